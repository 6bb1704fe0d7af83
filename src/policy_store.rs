//! Opens the policy store as the configuration describes it.

use anyhow::Context;
use artifact::memory;
use artifact::threads::Threads;
use store::{Cache, Limits, Store};

use crate::config::Config;

/// The store of the configuration. A store that is not on this machine gets a cache in the state
/// folder.
pub fn open(config: &Config) -> anyhow::Result<Store> {
    let url = config.store_url();
    let store = with_threads(open_url(&url, config.policy.store_api_key.as_deref())?, config)?;
    if url.starts_with("file://") {
        return Ok(store);
    }
    let folder = config.state_dir.join("objects");
    let limits = Limits {
        bytes_max: config.policy.cache_bytes_max,
        streams: config.policy.cache_streams,
    };
    let cache = Cache::open(&folder, limits).with_context(|| format!("open {}", folder.display()))?;
    Ok(store.with_cache(cache))
}

/// An object store, or a relay in front of one.
pub fn open_url(url: &str, api_key: Option<&str>) -> anyhow::Result<Store> {
    let store = if url.starts_with("http://") || url.starts_with("https://") {
        serving::relay::open(url, api_key)
    } else {
        Store::open(url).map_err(Into::into)
    };
    store.with_context(|| format!("open the policy store {url}"))
}

/// Lets the store encode and apply deltas on `policy.sync_threads` threads.
/// Weights of this process keep to `policy.memory_bytes` from now on.
pub fn with_threads(store: Store, config: &Config) -> anyhow::Result<Store> {
    memory::budget(config.policy.memory_bytes, &config.state_dir.join("weights"));
    let threads = Threads::new(config.policy.sync_threads.into()).context("policy.sync_threads")?;
    Ok(store.with_threads(threads))
}
