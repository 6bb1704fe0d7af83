//! `[tls]`: certificates of listeners and clients; and the checks that no connection to another
//! machine is unencrypted unless somebody has said so.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::path::{Path, PathBuf};

use anyhow::{Context, bail, ensure};
use edge::tls::{ClientOptions, ServerOptions};
use sqlx::postgres::{PgConnectOptions, PgSslMode};

use super::{Config, Part};

edge::options! {
    /// `[tls]`: TLS for every listener, and what HTTP clients trust. Files are PEM. Changed certificates
    /// of listeners are used without a restart.
    #[derive(Eq)]
    pub struct Tls {
        /// The certificate of all listeners, then those of intermediate authorities. Default: none, plain
        /// HTTP.
        pub cert: Option<PathBuf> = None,
        /// Its private key, not encrypted.
        pub key: Option<PathBuf> = None,
        /// Authorities of clients. If set, a client needs a certificate from one of them.
        pub client_ca: Option<PathBuf> = None,
        /// Authorities that roles and commands trust when they call other roles, beside the
        /// system's.
        pub ca: Option<PathBuf> = None,
        /// The certificate that roles and commands show when they call other roles.
        pub client_cert: Option<PathBuf> = None,
        /// Its private key, not encrypted.
        pub client_key: Option<PathBuf> = None,
        /// For this role instead of `cert`, `key` and `client_ca`.
        pub serve: Option<ServerOptions> = None,
        /// For this role instead of `cert`, `key` and `client_ca`; also for a collector.
        pub ingest: Option<ServerOptions> = None,
        /// For this role instead of `cert`, `key` and `client_ca`.
        pub control: Option<ServerOptions> = None,
        /// For this role instead of `cert`, `key` and `client_ca`.
        pub train: Option<ServerOptions> = None,
        /// For this role instead of `cert`, `key` and `client_ca`.
        pub relay: Option<ServerOptions> = None,
        /// For this role instead of `cert`, `key` and `client_ca`.
        pub follow: Option<ServerOptions> = None,
        /// For this role instead of `cert`, `key` and `client_ca`.
        pub world: Option<ServerOptions> = None,
    }
}

impl Tls {
    /// What the listener of `part` uses; `None`: plain HTTP.
    pub fn of(&self, part: Part) -> Option<ServerOptions> {
        let own = match part {
            Part::Serve => &self.serve,
            Part::Ingest => &self.ingest,
            Part::Control => &self.control,
            Part::Train => &self.train,
            Part::Relay => &self.relay,
            Part::Follow => &self.follow,
            Part::World => &self.world,
        };
        let common = || {
            Some(ServerOptions {
                cert: self.cert.clone()?,
                key: self.key.clone()?,
                client_ca: self.client_ca.clone(),
            })
        };
        own.clone().or_else(common)
    }

    pub fn client(&self) -> ClientOptions {
        ClientOptions {
            ca: self.ca.clone(),
            cert: self.client_cert.clone(),
            key: self.client_key.clone(),
        }
    }

    pub(super) fn check(&self) -> anyhow::Result<()> {
        for (cert, key, names) in [
            (&self.cert, &self.key, "tls.cert and tls.key"),
            (
                &self.client_cert,
                &self.client_key,
                "tls.client_cert and tls.client_key",
            ),
        ] {
            ensure!(
                cert.is_some() == key.is_some(),
                "only one of {names} is set: set both or none"
            );
        }
        ensure!(
            self.client_ca.is_none() || self.cert.is_some(),
            "tls.client_ca is set without tls.cert, so no listener would ask for certificates: set tls.cert and tls.key"
        );
        Ok(())
    }

    pub(super) fn resolve(&mut self, config_dir: &Path) {
        let own = [
            &mut self.serve,
            &mut self.ingest,
            &mut self.control,
            &mut self.train,
            &mut self.relay,
            &mut self.follow,
            &mut self.world,
        ];
        for listener in own.into_iter().flatten() {
            for path in [&mut listener.cert, &mut listener.key]
                .into_iter()
                .chain(&mut listener.client_ca)
            {
                *path = config_dir.join(&*path);
            }
        }
        for path in [
            &mut self.cert,
            &mut self.key,
            &mut self.client_ca,
            &mut self.ca,
            &mut self.client_cert,
            &mut self.client_key,
        ] {
            *path = path.take().map(|path| config_dir.join(path));
        }
    }
}

impl Config {
    /// Refuses connections to another machine's Postgres or Kafka that are, or may become,
    /// unencrypted, unless the configuration says so.
    pub(super) fn check_remote_servers(&self) -> anyhow::Result<()> {
        if let Some(url) = &self.postgres.url {
            check_postgres("postgres.url", url)?;
        }
        for (field, url) in self.postgres.urls.all() {
            ensure!(
                self.postgres.url.is_some(),
                "{field} is set, but postgres.url is not: the private Postgres has users of its own"
            );
            check_postgres(field, url)?;
        }
        match self.kafka.librdkafka_file {
            Some(_) => Ok(()), // it is checked with the file's settings, when they are read
            None => self.check_kafka(&self.kafka.librdkafka),
        }
    }

    /// `settings`: all of librdkafka's.
    pub(super) fn check_kafka(&self, settings: &BTreeMap<String, String>) -> anyhow::Result<()> {
        let brokers = self.kafka.brokers.as_deref().unwrap_or_default();
        let mut brokers = brokers.split(',').map(str::trim).filter(|broker| !broker.is_empty());
        let remote = brokers.find(|broker| !is_local(host(broker)));
        if let Some(broker) = remote.filter(|_| !settings.contains_key("security.protocol")) {
            bail!(
                "kafka.brokers names {broker}, on another machine, and kafka.librdkafka has no security.protocol: \
                 set it to \"sasl_ssl\" or \"ssl\", or to \"plaintext\" if the network may read and change the log"
            );
        }
        Ok(())
    }
}

fn check_postgres(field: &str, url: &str) -> anyhow::Result<()> {
    let options: PgConnectOptions = url.parse().with_context(|| format!("parse {field}"))?;
    let host = options.get_host();
    if options.get_socket().is_some() || host.starts_with('/') || is_local(host) {
        return Ok(());
    }
    match options.get_ssl_mode() {
        PgSslMode::VerifyFull | PgSslMode::VerifyCa | PgSslMode::Require | PgSslMode::Disable => Ok(()),
        // Both go on without encryption if the server, or somebody on the way, says so.
        PgSslMode::Prefer | PgSslMode::Allow => bail!(
            "{field} names {host}, on another machine, without an sslmode that insists on encryption: \
             add ?sslmode=verify-full&sslrootcert=/path/to/ca.pem, \
             or sslmode=disable if the network may read and change the tables"
        ),
    }
}

/// `host` or `[address]` of `host:port`, without a protocol before it.
fn host(broker: &str) -> &str {
    let broker = broker.split_once("://").map_or(broker, |(_, broker)| broker);
    let host = match broker.rsplit_once(':') {
        Some((host, port)) if port.bytes().all(|byte| byte.is_ascii_digit()) => host,
        _ => broker,
    };
    host.trim_start_matches('[').trim_end_matches(']')
}

fn is_local(host: &str) -> bool {
    let host = host.trim_start_matches('[').trim_end_matches(']');
    match host.parse::<IpAddr>() {
        Ok(address) => address.to_canonical().is_loopback(),
        Err(_) => host.eq_ignore_ascii_case("localhost"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn another_machines_postgres_needs_a_sslmode_that_does_not_fall_back() {
        for fine in [
            "postgres://u:p@127.0.0.1:5432/d",
            "postgres://u:p@localhost/d",
            "postgres://u:p@[::1]/d",
            "postgres://u@%2Frun%2Fpostgresql/d",
            "postgres:///d?host=/run/postgresql",
            "postgres://u:p@db.example/d?sslmode=verify-full&sslrootcert=/ca.pem",
            "postgres://u:p@db.example/d?sslmode=require",
            "postgres://u:p@db.example/d?sslmode=disable",
        ] {
            check_postgres("postgres.url", fine).unwrap_or_else(|error| panic!("{fine}: {error}"));
        }
        for refused in [
            "postgres://u:secret@db.example/d",
            "postgres://u:secret@10.0.0.7:5432/d",
            "postgres://u:secret@db.example/d?sslmode=prefer",
            "postgres://u:secret@db.example/d?sslmode=allow",
        ] {
            let why = check_postgres("postgres.url", refused).unwrap_err().to_string();
            assert!(why.contains("verify-full") && !why.contains("secret"), "{why}");
        }
    }

    #[test]
    fn another_machines_kafka_needs_a_security_protocol() {
        let mut config = Config::default();
        for local in [
            "127.0.0.1:9092",
            "localhost:9092,[::1]:9092",
            "PLAINTEXT://127.0.0.1:9092",
        ] {
            config.kafka.brokers = Some(local.to_owned());
            config.check_remote_servers().unwrap();
        }
        for remote in [
            "broker-1:9092",
            "127.0.0.1:9092, 10.0.0.7:9092",
            "ssl://broker-1:9093",
            "[fd00::1]:9092",
        ] {
            config.kafka.brokers = Some(remote.to_owned());
            let why = config.check_remote_servers().unwrap_err().to_string();
            assert!(why.contains("security.protocol"), "{remote}: {why}");
        }
        for chosen in ["sasl_ssl", "plaintext"] {
            config
                .kafka
                .librdkafka
                .insert("security.protocol".to_owned(), chosen.to_owned());
            config.check_remote_servers().unwrap();
        }
    }

    #[test]
    fn a_roles_own_certificate_replaces_the_common_one() {
        let mut tls = Tls {
            cert: Some("common.pem".into()),
            key: Some("common.key".into()),
            client_ca: Some("clients.pem".into()),
            ..Tls::default()
        };
        tls.train = Some(ServerOptions {
            cert: "train.pem".into(),
            key: "train.key".into(),
            client_ca: None,
        });
        tls.resolve(Path::new("/etc/springtide"));
        let serve = tls.of(Part::Serve).unwrap();
        assert_eq!(serve.cert, Path::new("/etc/springtide/common.pem"));
        assert_eq!(serve.client_ca.unwrap(), Path::new("/etc/springtide/clients.pem"));
        let train = tls.of(Part::Train).unwrap();
        assert_eq!(
            (train.key.as_path(), train.client_ca),
            (Path::new("/etc/springtide/train.key"), None)
        );
        assert_eq!(Tls::default().of(Part::Serve), None);
    }

    #[test]
    fn half_a_certificate_is_refused() {
        let mut tls = Tls {
            cert: Some("a.pem".into()),
            ..Tls::default()
        };
        assert!(tls.check().unwrap_err().to_string().contains("tls.key"));
        tls = Tls {
            client_ca: Some("a.pem".into()),
            ..Tls::default()
        };
        assert!(tls.check().unwrap_err().to_string().contains("tls.cert"));
    }
}
