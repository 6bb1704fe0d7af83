//! TLS 1.2 and 1.3 for listeners, with client certificates if asked for, and what the process's HTTP
//! clients trust.
//!
//! Everything uses the distribution's OpenSSL, as librdkafka and the clients of Postgres and S3 do:
//! one TLS implementation, which the distribution patches. See docs/security.md.

mod client;
mod stream;
#[cfg(test)]
pub(crate) mod tests;

use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Context, ensure};
use openssl::pkey::{PKey, Private};
use openssl::ssl::{
    AlpnError, Ssl, SslAcceptor, SslContext, SslMethod, SslOptions, SslSessionCacheMode, SslVerifyMode, SslVersion,
    select_next_proto,
};
use openssl::stack::Stack;
use openssl::x509::X509;
use openssl::x509::store::X509StoreBuilder;
use serde::{Deserialize, Serialize};
use tokio::net::TcpStream;

pub use client::{ClientOptions, client, client_of_others, trust};
pub use stream::{Stream, TlsStream};

/// How soon a changed file is noticed.
const LOOK_EVERY: Duration = Duration::from_secs(5);
/// What clients may choose from, best first, each behind its length.
const PROTOCOLS: &[u8] = b"\x02h2\x08http/1.1";

/// A listener's certificate.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ServerOptions {
    /// PEM file: the certificate, then those of intermediate authorities.
    pub cert: PathBuf,
    /// PEM file of its private key, not encrypted.
    pub key: PathBuf,
    /// PEM file of authorities. If set, only clients with a certificate from one of them may
    /// connect. Default: none.
    #[serde(default)]
    pub client_ca: Option<PathBuf>,
}

/// Accepts TLS connections. [`Acceptor::follow_files`] keeps its certificate up to date.
pub struct Acceptor {
    options: ServerOptions,
    look_every: Duration,
    loaded: Mutex<Loaded>,
}

struct Loaded {
    files: Files,
    context: SslContext,
}

/// The bytes of the three files.
#[derive(PartialEq, Eq)]
struct Files {
    cert: Vec<u8>,
    key: Vec<u8>,
    client_ca: Option<Vec<u8>>,
}

impl Acceptor {
    /// Reads the files.
    pub fn load(options: ServerOptions) -> anyhow::Result<Self> {
        let files = Files::read(&options)?;
        let context = files.context(&options)?;
        Ok(Self {
            options,
            look_every: LOOK_EVERY,
            loaded: Mutex::new(Loaded { files, context }),
        })
    }

    /// Runs the handshake. The caller limits its time.
    pub async fn accept(&self, tcp: TcpStream) -> anyhow::Result<Stream> {
        let context = self
            .loaded
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .context
            .clone();
        let ssl = Ssl::new(&context).context("start TLS")?;
        let stream = TlsStream::accept(ssl, tcp).await.context("TLS handshake")?;
        Ok(Stream::Tls(stream))
    }

    /// Uses changed files for new connections, for as long as it runs. Files that do not work, such
    /// as a new certificate whose key is not there yet, change nothing.
    pub(crate) async fn follow_files(&self) {
        let mut failing = None;
        loop {
            tokio::time::sleep(self.look_every).await;
            let failed = match self.reload() {
                Ok(true) => {
                    tracing::info!(cert = %self.options.cert.display(), "new TLS certificate");
                    None
                }
                Ok(false) => None,
                Err(error) => Some(format!("{error:#}")),
            };
            if let Some(error) = failed.as_ref().filter(|_| failed != failing) {
                tracing::warn!(error, "the changed TLS files are not used");
            }
            failing = failed;
        }
    }

    /// Whether there was something new.
    fn reload(&self) -> anyhow::Result<bool> {
        let files = Files::read(&self.options)?;
        let mut loaded = self.loaded.lock().unwrap_or_else(PoisonError::into_inner);
        if files == loaded.files {
            return Ok(false);
        }
        let context = files.context(&self.options)?;
        *loaded = Loaded { files, context };
        Ok(true)
    }
}

impl Files {
    fn read(options: &ServerOptions) -> anyhow::Result<Self> {
        Ok(Self {
            cert: read(&options.cert)?,
            key: read(&options.key)?,
            client_ca: options.client_ca.as_deref().map(read).transpose()?,
        })
    }

    /// Mozilla's "intermediate" settings, HTTP/2 and HTTP/1.1.
    fn context(&self, options: &ServerOptions) -> anyhow::Result<SslContext> {
        let certificates = |pem: &[u8], path: &Path| certificates(pem).with_context(|| path.display().to_string());
        let mut builder = SslAcceptor::mozilla_intermediate_v5(SslMethod::tls_server()).context("set up TLS")?;
        builder
            .set_min_proto_version(Some(SslVersion::TLS1_2))
            .context("set TLS versions")?;
        let mut chain = certificates(&self.cert, &options.cert)?.into_iter();
        let own = chain.next().context("a certificate file is empty")?;
        builder.set_certificate(&own).context("use the certificate")?;
        for authority in chain {
            builder
                .add_extra_chain_cert(authority)
                .context("use an intermediate certificate")?;
        }
        let key = private_key(&self.key).with_context(|| options.key.display().to_string())?;
        builder
            .set_private_key(&key)
            .and_then(|()| builder.check_private_key())
            .with_context(|| {
                let (key, cert) = (options.key.display(), options.cert.display());
                format!("{key} is not the key of {cert}")
            })?;
        if let (Some(pem), Some(path)) = (&self.client_ca, &options.client_ca) {
            let mut trusted = X509StoreBuilder::new().context("set up trust")?;
            let mut names = Stack::new().context("set up trust")?;
            for authority in certificates(pem, path)? {
                let name = authority
                    .subject_name()
                    .to_owned()
                    .context("read an authority's name")?;
                names.push(name).context("name an authority")?;
                trusted.add_cert(authority).context("trust an authority")?;
            }
            builder
                .set_verify_cert_store(trusted.build())
                .context("trust the client authorities")?;
            builder.set_client_ca_list(names);
            builder.set_verify(SslVerifyMode::PEER | SslVerifyMode::FAIL_IF_NO_PEER_CERT);
            // A resumed session would skip the check.
            builder.set_session_cache_mode(SslSessionCacheMode::OFF);
            builder.set_options(SslOptions::NO_TICKET);
            builder.set_num_tickets(0).context("refuse resumption")?;
        }
        builder.set_alpn_select_callback(|_, offered| select_next_proto(PROTOCOLS, offered).ok_or(AlpnError::NOACK));
        Ok(builder.build().into_context())
    }
}

fn read(path: &Path) -> anyhow::Result<Vec<u8>> {
    std::fs::read(path).with_context(|| format!("read {}", path.display()))
}

fn certificates(pem: &[u8]) -> anyhow::Result<Vec<X509>> {
    let certificates = X509::stack_from_pem(pem).context("parse PEM certificates")?;
    ensure!(!certificates.is_empty(), "has no PEM certificate");
    Ok(certificates)
}

fn private_key(pem: &[u8]) -> anyhow::Result<PKey<Private>> {
    // Without the callback OpenSSL would ask on the terminal.
    PKey::private_key_from_pem_callback(pem, |_| Ok(0)).context("parse an unencrypted PEM private key")
}
