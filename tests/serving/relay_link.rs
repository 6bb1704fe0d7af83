//! Two relays in a row over a link that is slow, loses packets and is down for a while. Each relay
//! has its own network namespace, and the follower can reach neither the first relay nor the store.
//! Needs root for namespaces and TUN devices.

use std::fs::File;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use artifact::manifest::ObjectRef;
use bytes::Bytes;
use link::{Conditions, Link, Namespace};
use rand::rngs::SmallRng;
use rand::{RngCore as _, SeedableRng as _};
use store::{Cache, Limits, Store};

use fixture::{SPRINGTIDE, eventually};

const POLICY: &str = "demo";
const KEY: &str = "spring_region";
/// Each namespace has all ports to itself.
const PORT: u16 = 8004;
const OBJECT_BYTES: usize = 10 << 20;
const DEADLINE: Duration = Duration::from_secs(300);
/// A round trip takes 20 ms.
const SLOW: Conditions = Conditions {
    rate_bits: Some(20_000_000),
    delay: Duration::from_millis(10),
    loss: 0.01,
    queue_bytes: 125_000,
};

/// A relay process in a namespace; killed on drop.
struct Relay {
    process: Child,
    url: String,
}

impl Relay {
    fn start(namespace: &Namespace, address: Ipv4Addr, folder: &Path, upstream: &str) -> Self {
        std::fs::create_dir_all(folder).unwrap();
        let address = SocketAddr::from((address, PORT));
        let mut command = Command::new(&*SPRINGTIDE);
        command
            .args(["--die-with", &std::process::id().to_string()])
            .args(["relay", "--upstream", upstream])
            .current_dir(folder)
            .env("SPRINGTIDE__STATE_DIR", folder.join("state"))
            .env("SPRINGTIDE__RELAY__LISTEN", address.to_string())
            .env("SPRINGTIDE__RELAY__API_KEY", KEY)
            .env("SPRINGTIDE__RELAY__CALLER_KEY", KEY)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(File::create(folder.join("relay.log")).unwrap());
        let process = namespace.run(move || command.spawn()).unwrap().unwrap();
        let url = format!("http://{address}");
        Self { process, url }
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        self.process.kill().unwrap();
        self.process.wait().unwrap();
    }
}

/// Waits until a relay answers; returns the bytes of objects that it has passed on.
async fn passed_on(url: &str) -> u64 {
    let client = reqwest::Client::new();
    let answer = eventually("the relay answers", DEADLINE, async || {
        client.get(format!("{url}/metrics")).bearer_auth(KEY).send().await.ok()
    });
    let text = answer.await.text().await.unwrap();
    let mut lines = text
        .lines()
        .filter(|line| line.starts_with("springtide_relay_bytes_total{"));
    let number = lines.next().and_then(|line| line.rsplit(' ').next());
    number.map_or(0, |number| number.parse().unwrap())
}

/// Runs async code inside a namespace.
fn inside<T: Send + 'static, F: Future<Output = T>>(
    namespace: &Namespace,
    work: impl FnOnce() -> F + Send + 'static,
) -> T {
    let runtime = || tokio::runtime::Runtime::new().unwrap();
    namespace.run(move || runtime().block_on(work())).unwrap()
}

#[test]
fn two_relays_transfer_an_object_over_a_slow_lossy_link_that_is_down_for_a_while() {
    // the store and the first relay; the second relay; the follower
    let namespaces: std::io::Result<Vec<Namespace>> = (0..3).map(|_| Namespace::new()).collect();
    let links = namespaces.and_then(|namespaces| {
        let long = Link::between(&namespaces[0], &namespaces[1], 1, SLOW, 7)?;
        let short = Link::between(&namespaces[1], &namespaces[2], 2, Conditions::FREE, 8)?;
        Ok((namespaces, long, short))
    });
    let (namespaces, long, short) = match links {
        Ok(links) => links,
        Err(error) => {
            eprintln!(
                "not run, because network namespaces and TUN devices cannot be made here (that needs root): {error}"
            );
            return;
        }
    };
    let [home, region, follower] = &namespaces[..] else {
        unreachable!("three were made")
    };
    let folder = tempfile::tempdir().unwrap();
    let store_url = format!("file://{}", folder.path().join("store").display());
    let mut bytes = vec![0; OBJECT_BYTES];
    SmallRng::seed_from_u64(7).fill_bytes(&mut bytes);
    let bytes = Bytes::from(bytes);
    let object: ObjectRef = tokio::runtime::Runtime::new()
        .unwrap()
        .block_on(Store::open(&store_url).unwrap().put_object(POLICY, &bytes))
        .unwrap();

    let first = Relay::start(home, long.near(), &folder.path().join("first"), &store_url);
    let url = first.url.clone();
    assert_eq!(inside(region, move || async move { passed_on(&url).await }), 0);
    let second = Relay::start(region, short.near(), &folder.path().join("second"), &first.url);
    let followed = [1, 2].map(|name| {
        let (url, folder) = (second.url.clone(), folder.path().join(format!("follower-{name}")));
        move || async move {
            let limits = Limits {
                bytes_max: 1 << 30,
                streams: 4,
            };
            passed_on(&url).await;
            let store = serving::relay::open(&url, Some(KEY)).unwrap();
            let store = store.with_cache(Cache::open(&folder, limits).unwrap());
            store.get_object(POLICY, &object).await.unwrap()
        }
    });
    let got = std::thread::scope(|scope| {
        // the link is down for three seconds in the middle
        scope.spawn(|| {
            let begun = Instant::now();
            while long.counts().bytes < OBJECT_BYTES as u64 / 4 && begun.elapsed() < DEADLINE {
                std::thread::sleep(Duration::from_millis(10));
            }
            long.set(Conditions { loss: 1.0, ..SLOW });
            std::thread::sleep(Duration::from_secs(3));
            long.set(SLOW);
        });
        inside(follower, move || {
            futures::future::join_all(followed.map(|follow| follow()))
        })
    });
    assert!(got.iter().all(|got| *got == bytes));

    let size = object.size_bytes;
    let (by_first, by_second) = (first.url.clone(), second.url.clone());
    assert_eq!(
        inside(region, move || async move { passed_on(&by_first).await }),
        size,
        "the object crosses the long distance once"
    );
    assert_eq!(
        inside(follower, move || async move { passed_on(&by_second).await }),
        2 * size
    );
    let crossed = long.counts();
    assert!(crossed.lost > 20, "{crossed:?}");
    assert!(
        crossed.bytes < size + size / 4,
        "more than the object, headers and lost packets: {crossed:?}"
    );
    let unreachable = inside(follower, {
        let url = first.url.clone();
        move || async move { reqwest::get(format!("{url}/health")).await.is_err() }
    });
    assert!(unreachable, "the follower can reach the first relay");
}
