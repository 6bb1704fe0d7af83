//! The spool as a whole: exactly the acknowledged events are forwarded, whatever crashes in
//! between.

mod disk;
mod proxy;
mod upstream;

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fs::OpenOptions;
use std::io;
use std::path::Path;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use event_log::event::{self, Feedback, Target};
use proptest::prelude::*;
use serde_json::Value;
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use super::folder::{Folder, REFUSED};
use super::segment::{HEADER_BYTES, SegmentHeader};
use super::*;
use disk::{Disk, Fault};
use upstream::{Reply, Upstream};

const SOON: Duration = Duration::from_secs(60);

fn feedback(episode: Uuid, text: &str) -> Event {
    let feedback = Feedback {
        id: Uuid::now_v7(),
        target: Target::Episode(episode),
        metric_name: "comment".to_owned(),
        value: event::Value::Text(text.to_owned()),
        tags: BTreeMap::new(),
    };
    feedback.into_event("default", "tests/spool", event::now())
}

fn options() -> Options {
    Options {
        commit_wait_ms: 0,
        backoff_seconds_max: 0.2,
        request_timeout_seconds: 0.5,
        ..Options::default()
    }
}

fn open_at(path: &Path, upstream: &str, options: &Options) -> Opened {
    open(path, upstream, options).unwrap()
}

/// Ends a spool like a kill. Waits only for the writer's thread, which would otherwise continue.
fn end(opened: Opened) {
    drop((opened.spool, opened.forwarder));
    opened.writer.join().unwrap();
}

/// Writes these events into a spool that nothing forwards yet.
async fn fill(path: &Path, events: &[Event]) {
    let opened = open_at(path, "http://127.0.0.1:9", &options());
    for event in events {
        opened.spool.append(event).await.unwrap();
    }
    end(opened);
}

/// A spool whose forwarder runs.
struct Running {
    spool: Spool,
    writer: std::thread::JoinHandle<()>,
    stop: CancellationToken,
    forwarding: tokio::task::JoinHandle<()>,
}

impl Running {
    fn start(opened: Opened) -> Self {
        let stop = CancellationToken::new();
        Self {
            spool: opened.spool,
            writer: opened.writer,
            forwarding: tokio::spawn(opened.forwarder.run(stop.clone())),
            stop,
        }
    }

    async fn stop(self) {
        self.stop.cancel();
        self.forwarding.await.unwrap();
        drop(self.spool);
        self.writer.join().unwrap();
    }
}

/// Runs the forwarder until the spool is empty.
async fn drain(path: &Path, upstream: &str, options: &Options) {
    let running = Running::start(open_at(path, upstream, options));
    let queue = &running.spool.queue;
    let started = Instant::now();
    while queue.first().is_some() || !segments(&path.join("postponed")).is_empty() {
        assert!(started.elapsed() < SOON, "not forwarded in time: {queue:?}");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    running.stop().await;
}

fn segments(path: &Path) -> Vec<std::path::PathBuf> {
    let entries = std::fs::read_dir(path).unwrap().map(|entry| entry.unwrap().path());
    let mut segments: Vec<_> = entries
        .filter(|path| path.extension().is_some_and(|extension| extension == "spool"))
        .collect();
    segments.sort();
    segments
}

#[tokio::test(flavor = "multi_thread")]
async fn spooled_events_are_forwarded_and_then_removed() {
    let dir = tempfile::tempdir().unwrap();
    let upstream = Upstream::default();
    let url = upstream.start().await;
    let options = Options {
        api_key: Some("spring_key".to_owned()),
        ..options()
    };
    let running = Running::start(open_at(dir.path(), &url, &options));
    let queue = &running.spool.queue;
    let mut sent = BTreeSet::new();
    for _ in 0..20 {
        let event = feedback(Uuid::now_v7(), "good");
        running.spool.append(&event).await.unwrap();
        sent.insert(event.id);
    }
    let started = Instant::now();
    // The last segment is removed once it is idle.
    while queue.first().is_some() || upstream.ids().len() < sent.len() {
        assert!(started.elapsed() < SOON, "{queue:?}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    assert_eq!(upstream.ids(), sent);
    assert_eq!(queue.level().bytes, 0);
    assert_eq!(queue.level().oldest_us, None);
    assert_eq!(
        *upstream.keys.lock().unwrap(),
        BTreeSet::from(["Bearer spring_key".to_owned()])
    );
    running.stop().await;
    assert_eq!(segments(dir.path()).len(), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_upstream_that_fails_in_every_way_finally_gets_all_events_in_order() {
    let dir = tempfile::tempdir().unwrap();
    let upstream = Upstream::default();
    let url = upstream.start().await;
    let mut expected: HashMap<String, Vec<String>> = HashMap::new();
    let episodes = [(); 3].map(|()| Uuid::now_v7());
    let mut events = Vec::new();
    for index in 0..30 {
        let episode = episodes[index % 3];
        let event = feedback(episode, "good");
        expected.entry(episode.to_string()).or_default().push(event.id.clone());
        events.push(event);
    }
    fill(dir.path(), &events).await;
    upstream.answer_with(&[
        Reply::Status(500),
        Reply::RetryLater(503),
        Reply::AcceptLate,
        Reply::Status(401),
        Reply::OtherServer,
        Reply::RetryLater(429),
        Reply::Status(404),
        Reply::Status(302),
    ]);
    let started = Instant::now();
    drain(dir.path(), &url, &options()).await;
    assert!(started.elapsed() >= Duration::from_secs(1), "Retry-After was ignored");
    assert_eq!(*upstream.accepted.lock().unwrap(), expected);
    assert!(!dir.path().join(REFUSED).exists());
}

#[tokio::test(flavor = "multi_thread")]
async fn events_wait_for_an_unreachable_upstream() {
    let dir = tempfile::tempdir().unwrap();
    let running = Running::start(open_at(dir.path(), "http://127.0.0.1:9", &options()));
    let event = feedback(Uuid::now_v7(), "good");
    running.spool.append(&event).await.unwrap();
    tokio::time::sleep(Duration::from_millis(300)).await;
    assert!(running.spool.queue.level().oldest_us.is_some());
    running.stop().await;
    let upstream = Upstream::default();
    let url = upstream.start().await;
    drain(dir.path(), &url, &options()).await;
    assert_eq!(upstream.ids(), BTreeSet::from([event.id]));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_forwarder_that_stops_waits_for_the_disk_and_the_folder_can_be_opened_again() {
    let dir = tempfile::tempdir().unwrap();
    let upstream = Upstream::default();
    let url = upstream.start().await;
    let opened = open_at(dir.path(), &url, &options());
    let event = feedback(Uuid::now_v7(), "good");
    opened.spool.append(&event).await.unwrap();
    // Opening a pipe to read it takes until another opens it to write.
    let segment = segments(dir.path()).remove(0);
    let aside = dir.path().join("aside");
    std::fs::rename(&segment, &aside).unwrap();
    let mkfifo = std::process::Command::new("mkfifo").arg(&segment).status();
    assert!(mkfifo.unwrap().success());
    let stop = CancellationToken::new();
    let forwarding = tokio::spawn(opened.forwarder.run(stop.clone()));
    tokio::time::sleep(Duration::from_millis(300)).await;
    stop.cancel();
    tokio::time::sleep(Duration::from_millis(100)).await;
    let waited = !forwarding.is_finished();
    drop(OpenOptions::new().read(true).write(true).open(&segment).unwrap());
    forwarding.await.unwrap();
    assert!(waited, "it did not wait for the disk");
    std::fs::rename(&aside, &segment).unwrap();
    drop(opened.spool);
    opened.writer.join().unwrap();
    drain(dir.path(), &url, &options()).await;
    assert_eq!(upstream.ids(), BTreeSet::from([event.id]));
}

#[tokio::test(flavor = "multi_thread")]
async fn permanently_refused_events_are_kept_with_the_answer_and_the_others_are_forwarded() {
    let dir = tempfile::tempdir().unwrap();
    let upstream = Upstream::default();
    let url = upstream.start().await;
    let episode = Uuid::now_v7();
    let events: Vec<Event> = (0..4).map(|_| feedback(episode, "what the user wrote")).collect();
    fill(dir.path(), &events).await;
    upstream.answer_with(&[Reply::Status(409), Reply::Status(400), Reply::Status(413)]);
    drain(dir.path(), &url, &options()).await;
    assert_eq!(upstream.ids(), BTreeSet::from([events[3].id.clone()]));
    let text = std::fs::read_to_string(dir.path().join(REFUSED)).unwrap();
    let lines: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let statuses: Vec<_> = lines.iter().map(|line| line["status"].as_u64().unwrap()).collect();
    assert_eq!(statuses, [409, 400, 413]);
    assert_eq!(lines[0]["problem"]["detail"], "another body before");
    let refused = Event::decode_json(lines[0]["event"].to_string().as_bytes()).unwrap();
    assert_eq!(refused, events[0]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_damaged_event_is_saved_and_the_others_are_forwarded() {
    let dir = tempfile::tempdir().unwrap();
    let upstream = Upstream::default();
    let url = upstream.start().await;
    let events: Vec<Event> = (0..3).map(|_| feedback(Uuid::now_v7(), "good")).collect();
    fill(dir.path(), &events).await;
    let segment = &segments(dir.path())[0];
    let mut bytes = std::fs::read(segment).unwrap();
    let middle = HEADER_BYTES + (bytes.len() - HEADER_BYTES) / 2;
    bytes[middle] ^= 1;
    std::fs::write(segment, &bytes).unwrap();
    drain(dir.path(), &url, &options()).await;
    assert_eq!(
        upstream.ids(),
        BTreeSet::from([events[0].id.clone(), events[2].id.clone()])
    );
    let third = (bytes.len() - HEADER_BYTES) / 3;
    let damaged = dir.path().join(format!("{:020}-{}.damaged", 1, HEADER_BYTES + third));
    assert_eq!(
        std::fs::read(damaged).unwrap(),
        bytes[HEADER_BYTES + third..HEADER_BYTES + 2 * third]
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_segment_with_a_damaged_header_is_saved_completely() {
    let dir = tempfile::tempdir().unwrap();
    let upstream = Upstream::default();
    let url = upstream.start().await;
    fill(dir.path(), &[feedback(Uuid::now_v7(), "lost")]).await;
    let segment = &segments(dir.path())[0];
    let mut bytes = std::fs::read(segment).unwrap();
    bytes[3] ^= 1;
    std::fs::write(segment, &bytes).unwrap();
    drain(dir.path(), &url, &options()).await;
    let damaged = dir.path().join(format!("{:020}-0.damaged", 1));
    assert_eq!(std::fs::read(damaged).unwrap(), bytes);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_full_spool_refuses_events_and_accepts_them_again_when_there_is_room() {
    let dir = tempfile::tempdir().unwrap();
    let upstream = Upstream::default();
    let url = upstream.start().await;
    let small = Options {
        bytes_max: 10_000,
        segment_bytes_max: 2_000,
        ..options()
    };
    let opened = open_at(dir.path(), &url, &small);
    let mut spooled = BTreeSet::new();
    let refusal = loop {
        let event = feedback(Uuid::now_v7(), &"x".repeat(500));
        match opened.spool.append(&event).await {
            Ok(()) => spooled.insert(event.id),
            Err(error) => break error,
        };
    };
    assert_eq!(refusal, Error::Full);
    let on_disk: u64 = segments(dir.path())
        .iter()
        .map(|path| path.metadata().unwrap().len())
        .sum();
    assert!(on_disk <= 10_000 && on_disk > 8_000, "{on_disk}");
    assert_eq!(on_disk, opened.spool.queue.used());
    end(opened);
    drain(dir.path(), &url, &small).await;
    assert_eq!(upstream.ids(), spooled);
    let opened = open_at(dir.path(), &url, &small);
    opened.spool.append(&feedback(Uuid::now_v7(), "again")).await.unwrap();
    end(opened);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_full_disk_refuses_events_and_leaves_no_partial_write() {
    for broken in [Fault::Append, Fault::Sync, Fault::Create] {
        let dir = tempfile::tempdir().unwrap();
        let upstream = Upstream::default();
        let url = upstream.start().await;
        let folder = Arc::new(Folder::open(dir.path()).unwrap());
        let disk = Disk::new(folder.clone());
        let fault = disk.fault.clone();
        let options = Options {
            segment_bytes_max: 200, // several segments, so that Create can fail
            ..options()
        };
        let opened = open_on(Box::new(disk), folder, &url, &options).unwrap();
        let mut spooled = BTreeSet::new();
        for now in [Fault::None, broken, broken, Fault::None, broken, Fault::None] {
            *fault.lock().unwrap() = now;
            let event = feedback(Uuid::now_v7(), "good");
            match opened.spool.append(&event).await {
                Ok(()) => assert!(spooled.insert(event.id) && now == Fault::None),
                Err(error) => assert_eq!((error, now), (Error::DiskFull, broken)),
            }
        }
        assert_eq!(spooled.len(), 3);
        end(opened);
        drain(dir.path(), &url, &options).await;
        assert_eq!(upstream.ids(), spooled, "{broken:?}");
        let damaged = std::fs::read_dir(dir.path()).unwrap().filter(|entry| {
            entry
                .as_ref()
                .unwrap()
                .path()
                .extension()
                .is_some_and(|e| e == "damaged")
        });
        assert_eq!(damaged.count(), 0, "{broken:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn many_waiting_events_share_one_flush() {
    let dir = tempfile::tempdir().unwrap();
    let folder = Arc::new(Folder::open(dir.path()).unwrap());
    let disk = Disk::new(folder.clone());
    let flushes = disk.flushes.clone();
    let options = Options {
        commit_wait_ms: 200,
        ..options()
    };
    let opened = open_on(Box::new(disk), folder, "http://127.0.0.1:9", &options).unwrap();
    let events: Vec<Event> = (0..100).map(|_| feedback(Uuid::now_v7(), "good")).collect();
    let waiting = events.iter().map(|event| opened.spool.append(event));
    for outcome in futures::future::join_all(waiting).await {
        outcome.unwrap();
    }
    assert!(flushes.load(Ordering::Relaxed) <= 3, "{flushes:?}");
    end(opened);
}

/// One step in the life of a spool.
#[derive(Debug, Clone)]
enum Step {
    Append {
        count: usize,
    },
    /// Ends the process while it writes an event that is not acknowledged: its record is truncated
    /// at `cut`.
    Crash {
        unacknowledged: Vec<u8>,
        cut: usize,
    },
    Forward {
        replies: Vec<u16>,
    },
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        4 => (1_usize..8).prop_map(|count| Step::Append { count }),
        2 => (proptest::collection::vec(any::<u8>(), 0..200), any::<usize>())
            .prop_map(|(unacknowledged, cut)| Step::Crash { unacknowledged, cut }),
        2 => proptest::collection::vec(prop_oneof![Just(503_u16), Just(500), Just(200)], 0..6)
            .prop_map(|replies| Step::Forward { replies }),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn no_acknowledged_event_is_lost_and_none_is_invented(steps in proptest::collection::vec(step(), 1..12)) {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
        runtime.block_on(live(steps));
    }
}

async fn live(steps: Vec<Step>) {
    let dir = tempfile::tempdir().unwrap();
    let upstream = Upstream::default();
    let url = upstream.start().await;
    let options = Options {
        segment_bytes_max: 600,
        backoff_seconds_max: 0.001,
        ..options()
    };
    let mut acknowledged = BTreeSet::new();
    let mut tried = BTreeSet::new();
    let mut opened = Some(open_at(dir.path(), &url, &options));
    for step in steps {
        match step {
            Step::Append { count } => {
                let spool = &opened.get_or_insert_with(|| open_at(dir.path(), &url, &options)).spool;
                for index in 0..count {
                    let event = feedback(Uuid::now_v7(), &"y".repeat(index * 37));
                    tried.insert(event.id.clone());
                    spool.append(&event).await.unwrap();
                    acknowledged.insert(event.id);
                }
            }
            Step::Crash { unacknowledged, cut } => {
                if let Some(opened) = opened.take() {
                    end(opened);
                }
                if let Some(last) = segments(dir.path()).last() {
                    append_torn(last, &unacknowledged, cut, &mut tried);
                }
            }
            Step::Forward { replies } => {
                if let Some(opened) = opened.take() {
                    end(opened);
                }
                let replies: Vec<_> = replies
                    .into_iter()
                    .map(|status| {
                        if status == 200 {
                            Reply::Accept
                        } else {
                            Reply::Status(status)
                        }
                    })
                    .collect();
                upstream.answer_with(&replies);
                drain(dir.path(), &url, &options).await;
                assert!(acknowledged.is_subset(&upstream.ids()));
            }
        }
    }
    if let Some(opened) = opened.take() {
        end(opened);
    }
    drain(dir.path(), &url, &options).await;
    let forwarded = upstream.ids();
    assert!(
        acknowledged.is_subset(&forwarded),
        "lost: {:?}",
        acknowledged.difference(&forwarded)
    );
    assert!(
        forwarded.is_subset(&tried),
        "invented: {:?}",
        forwarded.difference(&tried)
    );
}

/// Appends a record, truncated at any byte, as a crash would leave it. Its event was sent but not
/// acknowledged.
fn append_torn(segment: &Path, noise: &[u8], cut: usize, tried: &mut BTreeSet<String>) {
    let bytes = std::fs::read(segment).unwrap();
    let number = segment.file_stem().unwrap().to_str().unwrap().parse().unwrap();
    let Some(header) = SegmentHeader::decode(&bytes, number) else {
        return;
    };
    let event = feedback(Uuid::now_v7(), &String::from_utf8_lossy(noise));
    let mut more = Vec::new();
    header.append_record(&mut more, bytes.len() as u64, 1, &event.encode());
    tried.insert(event.id);
    more.truncate(cut % (more.len() + 1));
    let mut file = OpenOptions::new().append(true).open(segment).unwrap();
    io::Write::write_all(&mut file, &more).unwrap();
}
