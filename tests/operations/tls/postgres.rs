//! TLS in front of the tests' Postgres, whose build has none. It speaks as a server does whose
//! `pg_hba.conf` has only `hostssl` lines.

use std::net::SocketAddr;

use edge::tls::{Acceptor, ServerOptions, Stream};
use sqlx::postgres::PgConnectOptions;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, copy_bidirectional};
use tokio::net::{TcpListener, TcpStream, UnixStream};
use tokio_util::task::AbortOnDropHandle;

use fixture::Stack;
use fixture::ca::Issued;

/// The whole message in which a client asks for TLS.
const SSL_REQUEST: [u8; 8] = [0, 0, 0, 8, 4, 210, 22, 47];

pub struct Front {
    address: SocketAddr,
    database: PgConnectOptions,
    _task: AbortOnDropHandle<()>,
}

impl Front {
    pub async fn start(stack: &Stack, own: &Issued) -> Self {
        let (cert, key) = own.write(stack.dir.path(), "postgres");
        let acceptor = Acceptor::load(ServerOptions {
            cert,
            key,
            client_ca: None,
        });
        let acceptor = std::sync::Arc::new(acceptor.unwrap());
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let database: PgConnectOptions = stack.database_url.parse().unwrap();
        let to = database.clone();
        let task = tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                let (acceptor, to) = (acceptor.clone(), to.clone());
                tokio::spawn(async move { pass(client, &acceptor, &to).await.ok() });
            }
        });
        Self {
            address,
            database,
            _task: AbortOnDropHandle::new(task),
        }
    }

    pub fn url(&self, options: &str) -> String {
        let (user, database) = (self.database.get_username(), self.database.get_database().unwrap());
        format!("postgres://{user}@{}/{database}?{options}", self.address)
    }
}

trait Duplex: AsyncRead + AsyncWrite + Unpin + Send {}
impl<T: AsyncRead + AsyncWrite + Unpin + Send> Duplex for T {}

async fn pass(mut client: TcpStream, acceptor: &Acceptor, to: &PgConnectOptions) -> anyhow::Result<()> {
    let mut first = [0; 8];
    client.read_exact(&mut first).await?;
    if first != SSL_REQUEST {
        let mut fields = Vec::new();
        for field in [
            "SFATAL",
            "VFATAL",
            "C28000",
            "Mno pg_hba.conf entry for this host, no encryption",
        ] {
            fields.extend_from_slice(field.as_bytes());
            fields.push(0);
        }
        fields.push(0);
        let length = u32::try_from(fields.len())? + 4;
        client.write_all(b"E").await?;
        client.write_all(&length.to_be_bytes()).await?;
        client.write_all(&fields).await?;
        return Ok(client.shutdown().await?);
    }
    client.write_all(b"S").await?;
    let mut client: Stream = acceptor.accept(client).await?;
    let mut server: Box<dyn Duplex> = match to.get_socket() {
        Some(folder) => Box::new(UnixStream::connect(folder.join(format!(".s.PGSQL.{}", to.get_port()))).await?),
        None => Box::new(TcpStream::connect((to.get_host(), to.get_port())).await?),
    };
    copy_bidirectional(&mut client, &mut server).await?;
    Ok(())
}
