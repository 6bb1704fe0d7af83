//! Relays in front of a store, as processes: two regions, one behind the other. They answer
//! correctly or refuse, and each object crosses the long distance once.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use artifact::checkpoint::Checkpoint;
use artifact::manifest::{Manifest, ObjectRef, Parent};
use artifact::sign::SigningKey;
use artifact::tensor::TensorData;
use bytes::Bytes;
use object_store::ObjectStoreExt;
use safetensors::Dtype;
use store::{Cache, Limits, Store};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::process::{Child, Command};

use fixture::{SPRINGTIDE, process};

const POLICY: &str = "demo";
const KEY: &str = "spring_region";
/// Three parts.
const WEIGHTS: usize = 10 << 20;

struct Relay {
    process: Child,
    address: SocketAddr,
    folder: PathBuf,
}

impl Relay {
    async fn start(folder: &Path, name: &str, upstream: &str) -> Self {
        let [port] = edge::bind::free_ports().unwrap();
        let address = SocketAddr::from(([127, 0, 0, 1], port));
        let folder = folder.join(name);
        std::fs::create_dir_all(&folder).unwrap();
        let process = launch(&folder, address, upstream).await;
        Self {
            process,
            address,
            folder,
        }
    }

    fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    fn store(&self) -> Store {
        serving::relay::open(&self.url(), Some(KEY)).unwrap()
    }

    /// Bytes of objects that it has passed on, by its metrics.
    async fn passed_on(&self) -> u64 {
        let text = reqwest::get(format!("{}/metrics", self.url()))
            .await
            .unwrap()
            .text()
            .await
            .unwrap();
        let mut lines = text
            .lines()
            .filter(|line| line.starts_with("springtide_relay_bytes_total{"));
        let number = lines.next().and_then(|line| line.rsplit(' ').next());
        number.map_or(0, |number| number.parse().unwrap())
    }

    fn files(&self) -> Vec<String> {
        let files = std::fs::read_dir(self.folder.join("state/relay")).unwrap();
        files
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect()
    }
}

async fn launch(folder: &Path, address: SocketAddr, upstream: &str) -> Child {
    let mut command = Command::new(&*SPRINGTIDE);
    command
        .args(["relay", "--upstream", upstream])
        .current_dir(folder)
        .env("SPRINGTIDE__STATE_DIR", folder.join("state"))
        .env("SPRINGTIDE__RELAY__LISTEN", address.to_string())
        .env("SPRINGTIDE__RELAY__API_KEY", KEY)
        .env("SPRINGTIDE__RELAY__CALLER_KEY", KEY)
        .env("SPRINGTIDE__RELAY__STREAMS", "1");
    process::start(command, address, &folder.join("relay.log")).await
}

/// A proxy that forwards a limited number of bytes to the client, then stalls until the limit is
/// raised.
struct Link {
    address: SocketAddr,
    bytes_left: Arc<AtomicU64>,
}

impl Link {
    async fn start(to: SocketAddr, bytes: u64) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let bytes_left = Arc::new(AtomicU64::new(bytes));
        let shared = bytes_left.clone();
        tokio::spawn(async move {
            while let Ok((near, _)) = listener.accept().await {
                let Ok(far) = TcpStream::connect(to).await else {
                    continue;
                };
                let (mut near_read, mut near_write) = near.into_split();
                let (mut far_read, mut far_write) = far.into_split();
                tokio::spawn(async move { tokio::io::copy(&mut near_read, &mut far_write).await });
                let left = shared.clone();
                tokio::spawn(async move {
                    let mut bytes = vec![0; 64 << 10];
                    while let Ok(read @ 1..) = far_read.read(&mut bytes).await {
                        let carry = |left: u64| left.checked_sub(read as u64);
                        while left.fetch_update(Ordering::SeqCst, Ordering::SeqCst, carry).is_err() {
                            tokio::time::sleep(Duration::from_millis(20)).await;
                        }
                        if near_write.write_all(&bytes[..read]).await.is_err() {
                            break;
                        }
                    }
                });
            }
        });
        Self { address, bytes_left }
    }
}

fn checkpoint(serial: u8) -> Checkpoint {
    // a few weights change with each version
    let mut bytes: Vec<u8> = (0..2 * WEIGHTS).map(|index| (index % 251) as u8).collect();
    for index in 0..1000 {
        bytes[index * 20_000] = serial;
    }
    let tensor = TensorData {
        dtype: Dtype::BF16,
        shape: vec![WEIGHTS],
        bytes: bytes.into(),
    };
    let mut checkpoint = Checkpoint::default();
    checkpoint.tensors.insert("w".to_owned(), tensor);
    checkpoint
}

/// Publishes version 1 as a checkpoint and version 2 as a delta. Returns version 2 and the
/// checkpoint's object.
async fn publish(store: &Store, key: &SigningKey) -> (Checkpoint, ObjectRef) {
    let (first, second) = (checkpoint(1), checkpoint(2));
    let object = store.put_object(POLICY, &first.to_bytes().unwrap()).await.unwrap();
    let delta = artifact::delta::encode(&first, &second, &artifact::threads::Threads::ONE).unwrap();
    let delta = store.put_object(POLICY, &Bytes::from(delta)).await.unwrap();
    let base = Manifest {
        policy: POLICY.to_owned(),
        version: 1,
        root: first.root(),
        parent: None,
        line: "realtime".to_owned(),
        branch: 0,
        checkpoint: Some(object),
        delta: None,
        tensor_bytes: first.tensor_bytes(),
        run: None,
        fence: 1,
        created_at: time::OffsetDateTime::UNIX_EPOCH,
        quantized: vec![],
        delta_shards: vec![],
        reference: None,
        adapts: None,
    };
    let next = Manifest {
        version: 2,
        root: second.root(),
        parent: Some(Parent {
            version: 1,
            root: first.root(),
        }),
        checkpoint: None,
        delta: Some(delta),
        ..base.clone()
    };
    for manifest in [&base, &next] {
        store.put_manifest(manifest, key).await.unwrap();
    }
    (second, object)
}

#[tokio::test(flavor = "multi_thread")]
async fn versions_pass_two_relays_and_cross_the_long_distance_once() {
    let folder = tempfile::tempdir().unwrap();
    let url = format!("file://{}", folder.path().join("store").display());
    let store = Store::open(&url).unwrap();
    let key = SigningKey::from_seed(&[7; 32]);
    let (second, object) = publish(&store, &key).await;
    let first = Relay::start(folder.path(), "first", &url).await;
    let region = Relay::start(folder.path(), "second", &first.url()).await;

    let keys = key.trusted();
    let followers = (0..3).map(|_| {
        let (store, keys) = (region.store(), keys.clone());
        async move { store.materialize(POLICY, 2, &keys, &[]).await.unwrap() }
    });
    for got in futures::future::join_all(followers).await {
        assert_eq!(got.checkpoint.root(), second.root());
    }
    let delta = store.get_manifest(POLICY, 2, &keys).await.unwrap().delta.unwrap();
    let once = object.size_bytes + delta.size_bytes;
    assert_eq!(first.passed_on().await, once, "the first relay, to the second");
    assert_eq!(region.passed_on().await, 3 * once, "the second relay, to the followers");

    // cached objects are served while the store and the first relay are down; documents are not
    drop(first);
    let got = region.store().get_object(POLICY, &object).await.unwrap();
    assert_eq!(got.len() as u64, object.size_bytes);
    assert!(region.store().get_manifest(POLICY, 1, &keys).await.is_err());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_relay_requires_its_key_and_never_passes_on_private_objects() {
    let folder = tempfile::tempdir().unwrap();
    let url = format!("file://{}", folder.path().join("store").display());
    let store = Store::open(&url).unwrap();
    store
        .put_private("run/state", &Bytes::from_static(b"secret"))
        .await
        .unwrap();
    let object = store.put_object(POLICY, &Bytes::from_static(b"weights")).await.unwrap();
    let relay = Relay::start(folder.path(), "relay", &url).await;

    for key in [None, Some("spring_other")] {
        let refused = serving::relay::open(&relay.url(), key).unwrap();
        let error = refused.get_object(POLICY, &object).await.unwrap_err();
        assert!(format!("{error:?}").contains("Unauthenticated"), "{error:?}");
    }
    let through = relay.store();
    assert_eq!(through.get_object(POLICY, &object).await.unwrap(), b"weights"[..]);
    assert!(matches!(
        through.get_private("run/state").await,
        Err(store::Error::NotFound(_))
    ));
    let unknown = ObjectRef::of(b"never written");
    assert!(matches!(
        through.get_object(POLICY, &unknown).await,
        Err(store::Error::NotFound(_))
    ));
    let written = through
        .put_object(POLICY, &Bytes::from_static(b"more"))
        .await
        .unwrap_err();
    assert!(format!("{written:?}").contains("NotSupported"), "{written:?}");

    // a valid range, and one beyond the end
    let key = object_store::path::Path::from(format!("policy/{POLICY}/object/{}", object.digest));
    assert_eq!(through.backend().get_range(&key, 2..5).await.unwrap(), b"igh"[..]);
    let client = reqwest::Client::new();
    let beyond = client.get(format!("{}/v1/store/{key}", relay.url())).bearer_auth(KEY);
    assert_eq!(beyond.header("range", "bytes=7-").send().await.unwrap().status(), 416);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_object_is_passed_on_while_it_arrives_and_resumes_after_a_crash() {
    let folder = tempfile::tempdir().unwrap();
    let url = format!("file://{}", folder.path().join("store").display());
    let store = Store::open(&url).unwrap();
    let (_, object) = publish(&store, &SigningKey::from_seed(&[7; 32])).await;
    let first = Relay::start(folder.path(), "first", &url).await;
    let part = artifact::parts::PART_BYTES;
    let link = Link::start(first.address, part + (1 << 20)).await;
    let upstream = format!("http://{}", link.address);
    let mut region = Relay::start(folder.path(), "second", &upstream).await;

    let key = object_store::path::Path::from(format!("policy/{POLICY}/object/{}", object.digest));
    let head = region.store().backend().get_range(&key, 0..part).await.unwrap();
    let files = region.files();
    assert!(
        !files.contains(&object.digest.to_string()),
        "the object is complete already: {files:?}"
    );
    assert_eq!(head, store.get_object(POLICY, &object).await.unwrap()[..head.len()]);

    // a relay that is killed in the middle keeps the parts it has
    region.process.kill().await.unwrap();
    link.bytes_left.store(u64::MAX / 2, Ordering::SeqCst);
    let before = first.passed_on().await;
    region.process = launch(&region.folder, region.address, &upstream).await;
    let cache = Limits {
        bytes_max: 1 << 30,
        streams: 4,
    };
    let near = region
        .store()
        .with_cache(Cache::open(&folder.path().join("near"), cache).unwrap());
    let got = near.get_object(POLICY, &object).await.unwrap();
    assert_eq!(got.len() as u64, object.size_bytes);
    let again = first.passed_on().await - before;
    assert!(
        again <= object.size_bytes - part,
        "{again} bytes fetched again, although a part of {part} was cached"
    );
}
