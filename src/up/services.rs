//! The services of a stack: commands, ports, readiness probes. They stop in the reverse of the order
//! listed here.

use std::net::TcpListener;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::rc::Rc;
use std::time::Duration;

use anyhow::{Context, bail};
use nix::sys::signal::Signal;

use super::service::{Probe, Service};
use crate::config::{Config, Part};
use crate::stack::kafka::{self, Kafka};
use crate::stack::postgres::{self, Postgres};
use crate::stack::{exec, fetch, vllm};

const HEALTH_TIMEOUT: Duration = Duration::from_secs(2);

/// Postgres and Kafka, unless external ones are configured. Downloads what is missing.
pub async fn servers(config: &Config) -> anyhow::Result<Vec<Service>> {
    let mut services = Vec::new();
    if config.postgres.url.is_some() && config.kafka.brokers.is_some() {
        return Ok(services);
    }
    let cache = config.stack.cache.clone();
    let installations = tokio::task::spawn_blocking(move || fetch::fetch(&cache))
        .await
        .context("download the stack")??;
    if config.postgres.url.is_none() {
        services.push(postgres_service(Postgres {
            installation: installations.postgres,
            data: config.postgres_dir(),
            port: config.postgres.port,
            durable: true,
        }));
    }
    if config.kafka.brokers.is_none() {
        services.push(kafka_service(Kafka {
            java: installations.java,
            jars: installations.kafka,
            data: config.state_dir.join("kafka"),
            client_file: config.kafka_client_file(),
            port: config.kafka.port,
            controller_port: config.kafka.controller_port,
            heap_mib: config.kafka.heap_mib,
        }));
    }
    Ok(services)
}

fn postgres_service(server: Postgres) -> Service {
    let probed = server.clone();
    Service {
        name: "postgres",
        stop: postgres::STOP,
        probe: Rc::new(move || {
            let server = probed.clone();
            Box::pin(async move { server.ready().await })
        }),
        command: Box::new(move || {
            server.prepare()?;
            server.command()
        }),
    }
}

fn kafka_service(node: Kafka) -> Service {
    let probed = node.clone();
    Service {
        name: "kafka",
        stop: kafka::STOP,
        probe: Rc::new(move || {
            let node = probed.clone();
            Box::pin(async move { node.ready().await })
        }),
        command: Box::new(move || {
            node.prepare()?;
            node.command()
        }),
    }
}

/// The vLLM servers of `[stack.vllm]`.
pub fn engines(config: &Config) -> anyhow::Result<Vec<Service>> {
    let http = edge::tls::client().build().context("make an HTTP client")?;
    let engines = config.stack.vllm.servers().map(|(name, port)| {
        let options = config.stack.vllm.clone();
        let (base, model) = (config.policy.base.clone(), config.policy.name.clone());
        let (serves, copies) = (config.policy.serves, config.state_dir.clone());
        let lora = config.trainer.realtime.lora.as_ref().filter(|_| options.adapters);
        let limits = (config.serve.slots, lora.map(model::lora::Config::rank_max));
        Service {
            name,
            stop: vllm::STOP,
            probe: health(http.clone(), &vllm::url(port)),
            command: Box::new(move || {
                let base = match serves {
                    None => &base,
                    Some(spec) => &vllm::copy_of(&base, spec, &copies, port)?,
                };
                vllm::command(&options, base, &model, limits, port)
            }),
        }
    });
    Ok(engines.collect())
}

/// All start at the same time and stop in reverse order: serve first, control last.
pub fn roles(config: &Config, file: Option<&Path>) -> anyhow::Result<Vec<Service>> {
    let http = edge::tls::client()
        // The role's own process on this machine. Its certificate may name only where others reach it.
        .tls_danger_accept_invalid_hostnames(true)
        .build()
        .context("make an HTTP client")?;
    let roles = [Part::Control, Part::Train, Part::Ingest, Part::Serve].map(|part| {
        let (name, file) = (part.name(), file.map(Path::to_owned));
        Service {
            name,
            stop: Signal::SIGTERM,
            probe: health(http.clone(), &config.local_url(part)),
            command: Box::new(move || {
                let mut command = exec::own_subcommand(file.as_deref(), name)?;
                command.process_group(0); // Ctrl-C must reach only the supervisor
                Ok(command)
            }),
        }
    });
    Ok(roles.into())
}

/// Probes `GET /health`.
fn health(client: reqwest::Client, role_url: &str) -> Probe {
    let url = format!("{role_url}/health");
    Rc::new(move || {
        let request = client.get(&url).timeout(HEALTH_TIMEOUT).send();
        Box::pin(async move { request.await.is_ok_and(|response| response.status().is_success()) })
    })
}

/// Fails if a port is in use, naming the field to change.
pub fn check_ports(config: &Config) -> anyhow::Result<()> {
    for (field, address) in config.listen_addresses() {
        if let Err(error) = TcpListener::bind(address) {
            bail!("{field}: cannot listen on {address} ({error}): stop what uses it or change the field");
        }
    }
    Ok(())
}

/// The database's URL, unless it may hold a password.
pub fn shown_postgres(config: &Config) -> String {
    match config.postgres.url {
        Some(_) => "as in postgres.url".to_owned(),
        None => config.postgres_url(),
    }
}

/// The brokers, and the file with what their clients must set.
pub fn shown_kafka(config: &Config) -> String {
    let brokers = config.kafka_brokers();
    match config.kafka_settings_file() {
        Some(file) => format!("{brokers}; clients need the settings in {}", file.display()),
        None => brokers,
    }
}
