//! The parts of a stack, in the order of their starts: what runs, on which ports, how it is asked whether it is ready.

use std::net::{SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::time::Duration;

use anyhow::{Context, bail};
use nix::sys::signal::Signal;

use super::child;
use super::service::{Probe, Service};
use crate::config::Config;
use crate::stack::fetch;
use crate::stack::kafka::{self, Kafka};
use crate::stack::postgres::{self, Postgres};

const HEALTH_TIMEOUT: Duration = Duration::from_secs(2);

/// Postgres and Kafka, as far as no external one is configured; downloads them where they are missing.
pub async fn servers(config: &Config) -> anyhow::Result<Vec<Service>> {
    let mut services = Vec::new();
    if config.postgres.url.is_some() && config.kafka.brokers.is_some() {
        return Ok(services);
    }
    let cache = config.stack.cache.clone();
    let parts = tokio::task::spawn_blocking(move || fetch::all(&cache))
        .await
        .context("download the stack")??;
    if config.postgres.url.is_none() {
        services.push(postgres_service(private_postgres(config, parts.postgres)));
    }
    if config.kafka.brokers.is_none() {
        services.push(kafka_service(Kafka {
            java: parts.java,
            jars: parts.kafka,
            data: config.state_dir.join("kafka"),
            port: config.kafka.port,
            controller_port: config.kafka.controller_port,
            heap_mib: config.kafka.heap_mib,
        }));
    }
    Ok(services)
}

fn private_postgres(config: &Config, installation: PathBuf) -> Postgres {
    Postgres {
        installation,
        data: config.state_dir.join("postgres"),
        port: config.postgres.port,
        durable: true,
    }
}

fn postgres_service(server: Postgres) -> Service {
    let asked = server.clone();
    Service {
        name: "postgres",
        stop: postgres::STOP,
        probe: Rc::new(move || {
            let server = asked.clone();
            Box::pin(async move { server.ready().await })
        }),
        command: Box::new(move || {
            server.prepare()?;
            server.command()
        }),
    }
}

fn kafka_service(node: Kafka) -> Service {
    let asked = node.clone();
    Service {
        name: "kafka",
        stop: kafka::STOP,
        probe: Rc::new(move || {
            let node = asked.clone();
            Box::pin(async move { node.ready().await })
        }),
        command: Box::new(move || {
            node.prepare()?;
            node.command()
        }),
    }
}

/// Control first: it answers who serves what. Serve last: it is what users see.
pub fn roles(config: &Config, file: Option<&Path>) -> anyhow::Result<Vec<Service>> {
    let listen = &config.listen;
    let http = reqwest::Client::builder().build().context("make an HTTP client")?;
    let roles = [
        ("control", listen.control),
        ("train", listen.train),
        ("ingest", listen.ingest),
        ("serve", listen.serve),
    ]
    .map(|(name, address)| {
        let file = file.map(Path::to_owned);
        Service {
            name,
            stop: Signal::SIGTERM,
            probe: health(http.clone(), address),
            command: Box::new(move || child::own(file.as_deref(), name)),
        }
    });
    Ok(roles.into())
}

/// `GET /health` answers 200.
fn health(client: reqwest::Client, address: SocketAddr) -> Probe {
    let ip = if address.ip().is_unspecified() {
        [127, 0, 0, 1].into()
    } else {
        address.ip()
    };
    let url = format!("http://{}/health", SocketAddr::new(ip, address.port()));
    Rc::new(move || {
        let asking = client.get(&url).timeout(HEALTH_TIMEOUT).send();
        Box::pin(async move { asking.await.is_ok_and(|answer| answer.status().is_success()) })
    })
}

/// Refuses ports that something else holds, by the name of the field to change.
pub fn check_ports(config: &Config) -> anyhow::Result<()> {
    let listen = &config.listen;
    let loopback = |port| SocketAddr::from(([127, 0, 0, 1], port));
    let mut addresses = vec![
        ("listen.serve", listen.serve),
        ("listen.ingest", listen.ingest),
        ("listen.control", listen.control),
        ("listen.train", listen.train),
    ];
    if config.postgres.url.is_none() {
        addresses.push(("postgres.port", loopback(config.postgres.port)));
    }
    if config.kafka.brokers.is_none() {
        addresses.push(("kafka.port", loopback(config.kafka.port)));
        addresses.push(("kafka.controller_port", loopback(config.kafka.controller_port)));
    }
    for (field, address) in addresses {
        if let Err(error) = TcpListener::bind(address) {
            bail!("{field}: cannot listen on {address} ({error}); stop what holds it or change the field");
        }
    }
    Ok(())
}

/// The database's URL without what must not be seen.
pub fn shown_postgres(config: &Config) -> String {
    match config.postgres.url {
        Some(_) => "as in postgres.url".to_owned(),
        None => config.postgres_url(),
    }
}
