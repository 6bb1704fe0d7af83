//! TLS on every connection, with a private certificate authority: to Postgres, to a Kafka broker
//! with SASL/SCRAM, and between a command and the control role.

mod broker;
mod postgres;

use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::time::Duration;

use edge::bind::free_ports;

use self::broker::Broker;
use self::postgres::Front;
use fixture::ca::Authority;
use fixture::{SPRINGTIDE, Stack, eventually};

const START: Duration = Duration::from_secs(120);

fn springtide(config: &Path, args: &[&str]) -> Output {
    let mut command = Command::new(&*SPRINGTIDE);
    command.arg("--config").arg(config).args(args);
    command.output().unwrap()
}

/// Its errors, or `None` if it succeeded.
fn errors(output: &Output) -> Option<String> {
    let errors = String::from_utf8_lossy(&output.stderr).into_owned();
    (!output.status.success()).then_some(errors)
}

#[tokio::test(flavor = "multi_thread")]
async fn postgres_is_reached_over_tls_only_if_its_certificate_is_right() {
    let stack = Stack::start("tls_postgres").await;
    let dir = stack.dir.path();
    let (right, wrong) = (Authority::new("right"), Authority::new("wrong"));
    let (right_ca, wrong_ca) = (right.write(dir, "right.pem"), wrong.write(dir, "wrong.pem"));
    let front = Front::start(&stack, &right.issue(&["127.0.0.1"])).await;
    let elsewhere = Front::start(&stack, &right.issue(&["db.example"])).await;
    let migrate = async |front: &Front, options: String| {
        let config = dir.join("postgres.toml");
        let url = front.url(&options);
        std::fs::write(&config, format!("[postgres]\nurl = '{url}'\n")).unwrap();
        let run = move || springtide(&config, &["migrate"]);
        errors(&tokio::task::spawn_blocking(run).await.unwrap())
    };
    let verify = |ca: &Path| format!("sslmode=verify-full&sslrootcert={}", ca.display());

    assert_eq!(migrate(&front, verify(&right_ca)).await, None);
    let why = migrate(&front, verify(&wrong_ca)).await.unwrap();
    assert!(
        why.contains("over TLS") && why.contains("certificate verify failed"),
        "{why}"
    );
    let why = migrate(&elsewhere, verify(&right_ca)).await.unwrap();
    assert!(why.contains("over TLS"), "another host's certificate: {why}");
    let why = migrate(&front, "sslmode=disable".to_owned()).await.unwrap();
    assert!(why.contains("no encryption"), "{why}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_broker_is_reached_over_sasl_ssl_only_with_the_right_authority_and_password() {
    let dir = tempfile::tempdir().unwrap();
    let (right, wrong) = (Authority::new("right"), Authority::new("wrong"));
    let wrong_ca = wrong.write(dir.path(), "wrong.pem");
    let broker = Broker::start(dir.path(), &right).await;

    let topics = event_log::ensure_topics(&broker.options(), 2).await;
    topics.unwrap();
    let reason = |name: &str, value: &str, expected: &str| {
        let mut options = broker.options();
        options.librdkafka.insert(name.to_owned(), value.to_owned());
        broker::until_refused(&options, expected);
    };
    tokio::task::block_in_place(|| {
        reason(
            "ssl.ca.location",
            &wrong_ca.display().to_string(),
            "certificate verify failed",
        );
        reason("sasl.password", "wrong", "SASL authentication error");
        reason("security.protocol", "plaintext", "brokers are down");
    });
}

struct Control(Child);

impl Drop for Control {
    fn drop(&mut self) {
        self.0.kill().ok();
        self.0.wait().ok();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_role_and_its_callers_use_tls_everywhere() {
    let stack = Stack::start("tls_everywhere").await;
    let dir = stack.dir.path();
    let (authority, clients) = (Authority::new("servers"), Authority::new("clients"));
    let ca = authority.write(dir, "ca.pem");
    let clients_ca = clients.write(dir, "clients.pem");
    let own = authority.issue(&["127.0.0.1"]);
    let (cert, key) = own.write(dir, "server");
    let (client_cert, client_key) = clients.issue(&["release-engineer"]).write(dir, "client");
    let front = Front::start(&stack, &own).await;
    let broker = Broker::start(dir, &authority).await;
    event_log::ensure_topics(&broker.options(), 2).await.unwrap();

    let [port] = free_ports().unwrap();
    let mut settings = String::new();
    for (name, value) in &broker.options().librdkafka {
        settings += &format!("'{name}' = '{value}'\n");
    }
    let url = front.url(&format!("sslmode=verify-full&sslrootcert={}", ca.display()));
    let common = format!(
        "state_dir = '{}'\n[listen]\ncontrol = '127.0.0.1:{port}'\n[postgres]\nurl = '{url}'\n\
         [kafka]\nbrokers = '{}'\ntopic_prefix = '{}'\n[kafka.librdkafka]\n{settings}\
         [tls]\ncert = '{}'\nkey = '{}'\nclient_ca = '{}'\n",
        dir.join("state").display(),
        broker.options().brokers,
        broker.options().topic_prefix,
        cert.display(),
        key.display(),
        clients_ca.display(),
    );
    let config = |name: &str, more: String| {
        let path = dir.join(name);
        std::fs::write(&path, common.clone() + &more).unwrap();
        path
    };
    let role = config("role.toml", String::new());
    let known = config(
        "known.toml",
        format!(
            "ca = '{}'\nclient_cert = '{}'\nclient_key = '{}'\n",
            ca.display(),
            client_cert.display(),
            client_key.display()
        ),
    );
    let nameless = config("nameless.toml", format!("ca = '{}'\n", ca.display()));
    let trusting_nobody = config(
        "trusting_nobody.toml",
        format!(
            "client_cert = '{}'\nclient_key = '{}'\n",
            client_cert.display(),
            client_key.display()
        ),
    );

    let mut command = Command::new(&*SPRINGTIDE);
    command.arg("--config").arg(&role).arg("control").stdout(Stdio::null());
    let mut control = Control(command.spawn().unwrap());
    let list = async |config: &Path| {
        let config = config.to_owned();
        let run = move || errors(&springtide(&config, &["release", "list"]));
        tokio::task::spawn_blocking(run).await.unwrap()
    };
    eventually("control answers over TLS", START, async || {
        assert!(control.0.try_wait().unwrap().is_none(), "control has ended");
        list(&known).await.is_none().then_some(())
    })
    .await;
    assert!(list(&nameless).await.is_some(), "a caller without a certificate");
    let why = list(&trusting_nobody).await.unwrap();
    assert!(why.contains("certificate verify failed"), "{why}");
    let plain = reqwest::get(format!("http://127.0.0.1:{port}/health")).await;
    assert!(plain.is_err(), "{plain:?}");
}
