//! An object in a store that only the relay can reach, and its download by a follower through the
//! relay, as [`store::Cache`] does it for a version.

use std::fs::File;
use std::net::SocketAddr;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use artifact::manifest::ObjectRef;
use artifact::parts::PART_BYTES;
use bytes::Bytes;
use futures::StreamExt as _;
use futures::stream::FuturesUnordered;
use rand::rngs::SmallRng;
use rand::{RngCore as _, SeedableRng as _};
use store::{Cache, Limits, Store};
use tempfile::TempDir;
use tokio::runtime::Runtime;

use crate::Transfer;
use crate::region::Region;

const POLICY: &str = "demo";
const KEY: &str = "spring_region";
/// Each namespace has all ports to itself.
const PORT: u16 = 8004;
const START_MAX: Duration = Duration::from_secs(60);

pub struct Object {
    folder: TempDir,
    object: ObjectRef,
}

impl Object {
    /// An object of random bytes in a new store.
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

    /// Lets the relay cache the object, so that its access to the store is not measured.
    pub fn fill_relay(&self, springtide: &Path, region: &Region) -> anyhow::Result<()> {
        let limit = Duration::from_secs(600);
        let transfer = self.download(springtide, region, 8, limit)?;
        anyhow::ensure!(
            transfer.bytes == self.size_bytes(),
            "the relay was not filled within {limit:?}"
        );
        Ok(())
    }

    /// Downloads until every part is verified and stored at the far end, or until `limit`.
    pub fn download(
        &self,
        springtide: &Path,
        region: &Region,
        streams: usize,
        limit: Duration,
    ) -> anyhow::Result<Transfer> {
        let address = SocketAddr::from((region.link.near(), PORT));
        let _relay = Relay::start(springtide, &self.folder, region, address)?;
        let (object, far) = (self.object, tempfile::tempdir()?);
        region.far.run(move || {
            Runtime::new()?.block_on(async {
                wait_until_up(address).await?;
                let url = format!("http://{address}");
                let before = passed_on(&url).await?;
                let store = serving::relay::open(&url, Some(KEY))?;
                let bytes_max = 2 * object.size_bytes;
                let cache = Cache::open(far.path(), Limits { bytes_max, streams })?;
                let mut transfer = fetch(&store, &cache, &object, limit).await?;
                if transfer.bytes == object.size_bytes {
                    let passed_on = passed_on(&url).await? - before;
                    transfer.resent_parts = passed_on.saturating_sub(object.size_bytes).div_ceil(PART_BYTES);
                }
                Ok(transfer)
            })
        })?
    }
}

async fn fetch(store: &Store, cache: &Cache, object: &ObjectRef, limit: Duration) -> anyhow::Result<Transfer> {
    let started = Instant::now();
    let mut transfer = Transfer {
        bytes: 0,
        seconds: 0.0,
        resent_parts: 0,
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
            transfer.bytes += part?.len() as u64;
            transfer.seconds = started.elapsed().as_secs_f64();
        }
        Ok::<_, store::Error>(())
    };
    match tokio::time::timeout(limit, work).await {
        Ok(done) => done.context("download the object")?,
        Err(_) if transfer.bytes == 0 => bail!("no part arrived within {limit:?}"),
        Err(_) => {}
    }
    Ok(transfer)
}

/// `springtide relay` in the near namespace; killed on drop.
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
        // it may have ended already
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn url(folder: &TempDir) -> String {
    format!("file://{}", folder.path().join("store").display())
}

async fn wait_until_up(address: SocketAddr) -> anyhow::Result<()> {
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
