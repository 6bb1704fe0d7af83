//! An object in a store that only the relay is told of, and its download by who follows through the relay: what
//! [`policy::store::Cache`] does when a version is fetched.

use std::fs::File;
use std::net::SocketAddr;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use bytes::Bytes;
use futures::StreamExt as _;
use futures::stream::FuturesUnordered;
use policy::manifest::ObjectRef;
use policy::parts::PART_BYTES;
use policy::store::{Cache, Limits, Store};
use rand::rngs::SmallRng;
use rand::{RngCore as _, SeedableRng as _};
use tempfile::TempDir;
use tokio::runtime::Runtime;

use crate::Brought;
use crate::region::Region;

const POLICY: &str = "demo";
const KEY: &str = "spring_region";
/// Namespaces have all ports to themselves.
const PORT: u16 = 8004;
const START_MAX: Duration = Duration::from_secs(60);

pub struct Object {
    folder: TempDir,
    object: ObjectRef,
}

impl Object {
    /// Random bytes in a store of its own.
    pub fn make(size_bytes: u64) -> anyhow::Result<Self> {
        let folder = tempfile::tempdir()?;
        let mut bytes = vec![0; usize::try_from(size_bytes)?];
        SmallRng::seed_from_u64(size_bytes).fill_bytes(&mut bytes);
        let store = Store::open(&url(&folder))?;
        let object = Runtime::new()?.block_on(store.put_object(POLICY, &Bytes::from(bytes)))?;
        Ok(Self { folder, object })
    }

    pub fn size_bytes(&self) -> u64 {
        self.object.size_bytes
    }

    /// Lets the relay fetch it once, so that its own way to the store is no part of what is measured.
    pub fn fill_relay(&self, springtide: &Path, region: &Region) -> anyhow::Result<()> {
        let limit = Duration::from_secs(600);
        let brought = self.download(springtide, region, 8, limit)?;
        anyhow::ensure!(
            brought.bytes == self.size_bytes(),
            "the relay was not filled within {limit:?}"
        );
        Ok(())
    }

    /// Until every part has arrived at the far end, is verified and on its disk; or until `limit`.
    pub fn download(
        &self,
        springtide: &Path,
        region: &Region,
        streams: usize,
        limit: Duration,
    ) -> anyhow::Result<Brought> {
        let address = SocketAddr::from((region.link.near(), PORT));
        let _relay = Relay::start(springtide, &self.folder, region, address)?;
        let (object, far) = (self.object, tempfile::tempdir()?);
        region.far.run(move || {
            Runtime::new()?.block_on(async {
                answers(address).await?;
                let url = format!("http://{address}");
                let before = passed_on(&url).await?;
                let store = serving::relay::open(&url, Some(KEY))?;
                let bytes_max = 2 * object.size_bytes;
                let cache = Cache::open(far.path(), Limits { bytes_max, streams })?;
                let mut brought = fetch(&store, &cache, &object, limit).await?;
                if brought.bytes == object.size_bytes {
                    let passed_on = passed_on(&url).await? - before;
                    brought.again = passed_on.saturating_sub(object.size_bytes).div_ceil(PART_BYTES);
                }
                Ok(brought)
            })
        })?
    }
}

async fn fetch(store: &Store, cache: &Cache, object: &ObjectRef, limit: Duration) -> anyhow::Result<Brought> {
    let started = Instant::now();
    let mut brought = Brought {
        bytes: 0,
        seconds: 0.0,
        again: 0,
    };
    let work = async {
        let arrival = cache.object(store, POLICY, object).await?;
        let mut parts: FuturesUnordered<_> = (0..arrival.parts().count())
            .map(|index| {
                let arrival = arrival.clone();
                async move { arrival.part(index).await }
            })
            .collect();
        while let Some(part) = parts.next().await {
            brought.bytes += part?.len() as u64;
            brought.seconds = started.elapsed().as_secs_f64();
        }
        Ok::<_, policy::store::Error>(())
    };
    match tokio::time::timeout(limit, work).await {
        Ok(done) => done.context("download the object")?,
        Err(_) if brought.bytes == 0 => bail!("no part came within {limit:?}"),
        Err(_) => {}
    }
    Ok(brought)
}

/// `springtide relay` in the near namespace; ends with this.
struct Relay(Child);

impl Relay {
    fn start(springtide: &Path, folder: &TempDir, region: &Region, address: SocketAddr) -> anyhow::Result<Self> {
        let log = File::options()
            .create(true)
            .append(true)
            .open(folder.path().join("relay.log"))?;
        let mut command = Command::new(springtide.canonicalize()?);
        command
            .args([
                "--die-with",
                &std::process::id().to_string(),
                "relay",
                "--upstream",
                &url(folder),
            ])
            .current_dir(folder.path())
            .env("SPRINGTIDE__STATE_DIR", folder.path().join("state"))
            .env("SPRINGTIDE__RELAY__LISTEN", address.to_string())
            .env("SPRINGTIDE__RELAY__CALLER_KEY", KEY)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log);
        let child = region.near.run(move || command.spawn())?;
        Ok(Self(child.context("run the relay")?))
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn url(folder: &TempDir) -> String {
    format!("file://{}", folder.path().join("store").display())
}

async fn answers(address: SocketAddr) -> anyhow::Result<()> {
    let started = Instant::now();
    while !reqwest::get(format!("http://{address}/health"))
        .await
        .is_ok_and(|answer| answer.status() == 200)
    {
        anyhow::ensure!(started.elapsed() < START_MAX, "the relay does not answer at {address}");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    Ok(())
}

/// Bytes of objects that the relay has passed on.
async fn passed_on(url: &str) -> anyhow::Result<u64> {
    let text = reqwest::get(format!("{url}/metrics")).await?.text().await?;
    let mut lines = text
        .lines()
        .filter(|line| line.starts_with("springtide_relay_bytes_total{"));
    let number = lines.next().and_then(|line| line.rsplit(' ').next());
    number.map_or(Ok(0), |number| number.parse().context("read the relay's metrics"))
}
