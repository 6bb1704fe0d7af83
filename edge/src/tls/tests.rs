use super::*;

use std::io::{Read, Write};
use std::net::SocketAddr;

use axum::Router;
use axum::routing::get;
use openssl::ssl::{SslConnector, SslConnectorBuilder};
use tokio::net::TcpListener;
use tokio_util::sync::{CancellationToken, DropGuard};

use self::ca::{Authority, Issued};
use crate::server::{self, Limits, Listener};

#[path = "../../../tests/fixture/src/ca.rs"]
mod ca;

const LOOK_EVERY: Duration = Duration::from_millis(10);

struct Server {
    address: SocketAddr,
    dir: tempfile::TempDir,
    _stop: DropGuard,
}

impl Server {
    async fn start(own: &Issued, clients: Option<&Authority>) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let (cert, key) = own.write(dir.path(), "server");
        let options = ServerOptions {
            cert,
            key,
            client_ca: clients.map(|clients| clients.write(dir.path(), "clients.pem")),
        };
        let mut acceptor = Acceptor::load(options).unwrap();
        acceptor.look_every = LOOK_EVERY;
        let tcp = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = tcp.local_addr().unwrap();
        let stop = CancellationToken::new();
        let limits = Limits {
            head: Duration::from_millis(500),
            ..Limits::default()
        };
        let listener = Listener::from(tcp).limits(limits).tls(acceptor);
        let router = Router::new().route("/", get(|| async { "hello" }));
        tokio::spawn(server::run(listener, router, stop.clone()));
        Self {
            address,
            dir,
            _stop: stop.drop_guard(),
        }
    }

    /// The answer to `GET /` and the server's certificate.
    async fn get(&self, client: SslConnectorBuilder) -> anyhow::Result<(String, Vec<u8>)> {
        let address = self.address;
        let connector = client.build();
        let get = move || {
            let tcp = std::net::TcpStream::connect(address)?;
            let mut tls = connector
                .connect("localhost", tcp)
                .map_err(|error| anyhow::anyhow!("{error}"))?;
            tls.write_all(b"GET / HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")?;
            let mut answer = String::new();
            tls.read_to_string(&mut answer)?;
            let certificate = tls.ssl().peer_certificate().context("no certificate")?;
            Ok((answer, certificate.to_pem()?))
        };
        tokio::task::spawn_blocking(get).await.unwrap()
    }
}

fn trusting(authority: &Authority) -> SslConnectorBuilder {
    let mut builder = SslConnector::builder(SslMethod::tls_client()).unwrap();
    let mut store = X509StoreBuilder::new().unwrap();
    store.add_cert(X509::from_pem(&authority.pem()).unwrap()).unwrap();
    builder.set_cert_store(store.build());
    builder
}

fn with_certificate(mut builder: SslConnectorBuilder, own: &Issued) -> SslConnectorBuilder {
    builder
        .set_certificate(&X509::from_pem(&own.certificate).unwrap())
        .unwrap();
    builder.set_private_key(&private_key(&own.key).unwrap()).unwrap();
    builder
}

#[tokio::test]
async fn only_tls_is_answered_and_the_client_can_check_who_answers() {
    let (right, wrong) = (Authority::new("right"), Authority::new("wrong"));
    let server = Server::start(&right.issue(&["localhost"]), None).await;
    let (answer, _) = server.get(trusting(&right)).await.unwrap();
    assert!(
        answer.starts_with("HTTP/1.1 200 OK") && answer.ends_with("hello"),
        "{answer}"
    );
    server.get(trusting(&wrong)).await.unwrap_err();
    let plain = reqwest::get(format!("http://{}/", server.address)).await;
    assert!(plain.is_err(), "{plain:?}");
}

#[tokio::test]
async fn the_name_in_the_certificate_is_checked() {
    let authority = Authority::new("right");
    let server = Server::start(&authority.issue(&["other.example"]), None).await;
    server.get(trusting(&authority)).await.unwrap_err();
}

#[tokio::test]
async fn old_versions_of_tls_are_refused() {
    let authority = Authority::new("right");
    let server = Server::start(&authority.issue(&["localhost"]), None).await;
    for (version, fine) in [
        (SslVersion::TLS1_3, true),
        (SslVersion::TLS1_2, true),
        (SslVersion::TLS1_1, false),
        (SslVersion::TLS1, false),
    ] {
        let mut client = trusting(&authority);
        client.set_cipher_list("DEFAULT@SECLEVEL=0").unwrap();
        client.set_min_proto_version(Some(version)).unwrap();
        client.set_max_proto_version(Some(version)).unwrap();
        assert_eq!(server.get(client).await.is_ok(), fine, "{version:?}");
    }
}

#[tokio::test]
async fn with_client_ca_only_its_clients_are_answered() {
    let (authority, clients) = (Authority::new("servers"), Authority::new("clients"));
    let server = Server::start(&authority.issue(&["localhost"]), Some(&clients)).await;
    let own = clients.issue(&["collector"]);
    server.get(with_certificate(trusting(&authority), &own)).await.unwrap();
    server.get(trusting(&authority)).await.unwrap_err();
    let stranger = authority.issue(&["collector"]);
    server
        .get(with_certificate(trusting(&authority), &stranger))
        .await
        .unwrap_err();
}

#[tokio::test]
async fn a_changed_certificate_is_used_without_a_restart_and_a_broken_one_is_not() {
    let (old, new) = (Authority::new("old"), Authority::new("new"));
    let server = Server::start(&old.issue(&["localhost"]), None).await;
    let (_, first) = server.get(trusting(&old)).await.unwrap();

    // The key does not belong to the certificate until both are there.
    let next = new.issue(&["localhost"]);
    std::fs::write(server.dir.path().join("server.pem"), &next.certificate).unwrap();
    let acceptor = Acceptor::load(ServerOptions {
        cert: server.dir.path().join("server.pem"),
        key: server.dir.path().join("server.key"),
        client_ca: None,
    });
    let why = format!("{:#}", acceptor.err().unwrap());
    assert!(why.contains("is not the key of"), "{why}");
    tokio::time::sleep(5 * LOOK_EVERY).await;
    let (_, still) = server.get(trusting(&old)).await.unwrap();
    assert_eq!(first, still);

    std::fs::write(server.dir.path().join("server.key"), &next.key).unwrap();
    while server.get(trusting(&new)).await.is_err() {
        tokio::time::sleep(LOOK_EVERY).await;
    }
    server.get(trusting(&old)).await.unwrap_err();
}

#[tokio::test]
async fn a_client_that_does_not_finish_the_handshake_is_cut() {
    let authority = Authority::new("right");
    let server = Server::start(&authority.issue(&["localhost"]), None).await;
    let address = server.address;
    let closed = tokio::task::spawn_blocking(move || {
        let mut tcp = std::net::TcpStream::connect(address).unwrap();
        tcp.write_all(&[22, 3, 1, 2, 0]).unwrap(); // a record's header, and nothing in it
        tcp.read(&mut [0; 64])
    });
    assert!(matches!(closed.await.unwrap(), Ok(0) | Err(_)));
}

#[test]
fn an_encrypted_key_is_refused_and_nobody_is_asked() {
    let key = new_encrypted_key();
    let why = format!("{:#}", private_key(&key).unwrap_err());
    assert!(why.contains("unencrypted"), "{why}");
}

fn new_encrypted_key() -> Vec<u8> {
    let issued = Authority::new("right").issue(&["localhost"]);
    let key = private_key(&issued.key).unwrap();
    key.private_key_to_pem_pkcs8_passphrase(openssl::symm::Cipher::aes_128_cbc(), b"secret")
        .unwrap()
}

#[tokio::test]
async fn http2_is_offered() {
    let authority = Authority::new("right");
    let server = Server::start(&authority.issue(&["localhost"]), None).await;
    let address = server.address;
    let mut client = trusting(&authority);
    client.set_alpn_protos(PROTOCOLS).unwrap();
    let client = client.build();
    let chosen = tokio::task::spawn_blocking(move || {
        let tcp = std::net::TcpStream::connect(address).unwrap();
        let tls = client.connect("localhost", tcp).unwrap();
        tls.ssl().selected_alpn_protocol().map(<[u8]>::to_vec)
    });
    assert_eq!(chosen.await.unwrap().as_deref(), Some(&b"h2"[..]));
}
