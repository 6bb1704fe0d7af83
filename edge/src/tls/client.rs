//! The HTTP clients of this process: what they trust beside the system's authorities, and their own
//! certificate. Set once, when the process starts.

use std::path::PathBuf;
use std::sync::OnceLock;
use std::time::Duration;

use anyhow::{Context, ensure};
use reqwest::{Certificate, Identity};

/// Less than the servers keep an idle connection, so that no request goes into one that is closing.
const IDLE_MAX: Duration = Duration::from_secs(50);

static TRUST: OnceLock<Trust> = OnceLock::new();

#[derive(Default)]
struct Trust {
    authorities: Vec<Certificate>,
    identity: Option<Identity>,
}

/// What clients use.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ClientOptions {
    /// PEM file of authorities to trust beside the system's.
    pub ca: Option<PathBuf>,
    /// PEM file: the client's certificate, then those of intermediate authorities.
    pub cert: Option<PathBuf>,
    /// PEM file of its private key, not encrypted.
    pub key: Option<PathBuf>,
}

/// Makes every later [`client`] use `options`. Call it once, before the first client is made.
pub fn trust(options: &ClientOptions) -> anyhow::Result<()> {
    let mut trust = Trust::default();
    if let Some(path) = &options.ca {
        let pem = super::read(path)?;
        super::certificates(&pem).with_context(|| path.display().to_string())?;
        trust.authorities = Certificate::from_pem_bundle(&pem).with_context(|| path.display().to_string())?;
    }
    if let (Some(cert), Some(key)) = (&options.cert, &options.key) {
        let pem = super::private_key(&super::read(key)?).with_context(|| key.display().to_string())?;
        let pem = pem.private_key_to_pem_pkcs8().context("convert the client's key")?;
        let identity = Identity::from_pkcs8_pem(&super::read(cert)?, &pem);
        trust.identity = Some(identity.with_context(|| cert.display().to_string())?);
    }
    ensure!(TRUST.set(trust).is_ok(), "TLS clients were set up twice");
    Ok(())
}

/// A client that trusts what [`trust`] says.
pub fn client() -> reqwest::ClientBuilder {
    match &TRUST.get_or_init(Trust::default).identity {
        Some(identity) => client_of_others().identity(identity.clone()),
        None => client_of_others(),
    }
}

/// The same for services that are not of this stack: they do not see its certificate.
pub fn client_of_others() -> reqwest::ClientBuilder {
    reqwest::Client::builder()
        .pool_idle_timeout(IDLE_MAX)
        .tls_certs_merge(TRUST.get_or_init(Trust::default).authorities.iter().cloned())
}
