//! What versions need of memory where they are served, said before any of it is taken.

use crate::follower::{BYTES_PER_CHECKPOINT_BYTE, load_order};
use crate::options::Options;
use artifact::checkpoint::Checkpoint;
use artifact::need::{Limit, Need};
use artifact::sign::TrustedKeys;
use model::exact::{Compute, KvCache};
use model::size::Size;
use std::collections::BTreeSet;
use store::Store;

const MEND: &str = "raise serve.resident_bytes_max if the machine has more, lower serve.slots or \
                    serve.context_tokens_max, or let engines elsewhere answer (serve.remote)";

/// This many versions of one size.
pub fn needed(size: &Size, versions: u64, options: &Options, compute: Compute) -> Need {
    let cache = KvCache::bytes_for(&size.config, options.slots, options.context_tokens_max, compute);
    let weights = size.tensor_bytes.saturating_mul(BYTES_PER_CHECKPOINT_BYTE);
    Need::default()
        .and("weights", weights.saturating_mul(versions))
        .and("KV cache", cache.saturating_mul(versions))
}

/// Refuses versions that fit neither the configured memory nor the machine's.
pub fn ask(need: Need, what: &str, options: &Options, machine: &Limit) -> anyhow::Result<()> {
    let configured = Limit::setting("serve.resident_bytes_max", options.resident_bytes_max);
    let limit = if machine.bytes < configured.bytes {
        machine
    } else {
        &configured
    };
    need.fits(limit, what, MEND)?;
    Ok(())
}

/// A version that users are routed to.
struct InForce {
    /// Without tensors.
    files: Checkpoint,
    tensor_bytes: u64,
}

/// Refuses to start if the versions that users are routed to never fit. What cannot be read yet is for the
/// follower, which goes on trying.
pub async fn ask_at_start(
    store: &Store,
    policy: &str,
    keys: &TrustedKeys,
    options: &Options,
    compute: Compute,
    machine: &Limit,
) -> anyhow::Result<()> {
    if options.remote.is_used() {
        return Ok(()); // nobody computes with weights here: `policy.memory_bytes` bounds them
    }
    let is_required = |_: &str, required: bool| required;
    let versions = in_force(store, policy, keys, &options.cluster, is_required).await;
    let mut need = Need::default();
    for InForce { files, tensor_bytes } in &versions {
        let size = Size::of_files(&files.files, *tensor_bytes)?;
        need = need.plus(&needed(&size, 1, options, compute));
    }
    tracing::info!(
        versions = versions.len(),
        bytes = need.bytes(),
        "memory for the versions in force"
    );
    let what = format!("serving the versions of {policy} that are in force");
    ask(need, &what, options, machine)
}

/// The versions of the newest assignment that are `wanted`, by alias and whether it has no substitute.
async fn in_force(
    store: &Store,
    policy: &str,
    keys: &TrustedKeys,
    cluster: &str,
    wanted: impl Fn(&str, bool) -> bool,
) -> Vec<InForce> {
    let read = async {
        let keys = store.trusted(policy, keys.clone()).await?;
        let Some(assignment) = store.latest_assignment(policy, 0, &keys).await? else {
            return Ok(Vec::new());
        };
        let assignment = assignment.in_cluster(cluster);
        let order = load_order(&assignment);
        let order = order.iter().filter(|(alias, _, required)| wanted(alias, *required));
        let serials: BTreeSet<i64> = order.map(|(_, target, _)| target.version).collect();
        let mut versions = Vec::new();
        for serial in serials {
            let manifest = store.get_manifest(policy, serial, &keys).await?;
            let base = match manifest.adapts {
                Some(base) => store.get_manifest(policy, base.version, &keys).await?.tensor_bytes,
                None => 0,
            };
            versions.push(InForce {
                files: store.files(policy, serial, &keys, &["config.json"]).await?,
                tensor_bytes: manifest.tensor_bytes + base,
            });
        }
        Ok(versions)
    };
    read.await.unwrap_or_else(|error: store::Error| {
        tracing::info!(%error, "what the versions in force need is not known yet");
        Vec::new()
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    #[test]
    fn a_version_that_does_not_fit_is_refused_with_its_figures_and_the_setting() {
        let golden = concat!(env!("CARGO_MANIFEST_DIR"), "/../policy/model/tests/golden/qwen3");
        let size = Size::of_folder(Path::new(golden)).unwrap();
        let mut options = Options::default();
        let need = needed(&size, 2, &options, Compute::F32);
        let machine = |bytes| Limit::setting("the machine's memory", bytes);
        options.resident_bytes_max = need.bytes();
        ask(need.clone(), "two versions", &options, &machine(u64::MAX)).unwrap();
        options.resident_bytes_max -= 1;
        let refused = ask(need.clone(), "two versions", &options, &machine(u64::MAX)).unwrap_err();
        assert!(refused.to_string().contains("serve.resident_bytes_max is"), "{refused}");
        // a larger setting does not make the machine larger
        options.resident_bytes_max = u64::MAX;
        let refused = ask(need.clone(), "two versions", &options, &machine(need.bytes() - 1)).unwrap_err();
        assert!(refused.to_string().contains("the machine's memory is"), "{refused}");
    }
}
