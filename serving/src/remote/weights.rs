//! The exact model that engines are compared with, where there is memory for it. A gateway to engines
//! that take no weights from it holds none but these, and reads them for the probe alone.

use super::options::Options;
use anyhow::Context;
use artifact::checkpoint::Checkpoint;
use artifact::need::{Limit, Need};
use artifact::sign::TrustedKeys;
use model::exact::{Arithmetic, ExactModel};
use model::size::Size;
use std::sync::Arc;
use store::Store;

/// Where the weights of a version are read.
pub struct Source {
    pub store: Store,
    pub policy: String,
    pub keys: TrustedKeys,
}

/// The exact model of a version. `files`: without tensors if they are in the store alone. `None`: it needs more
/// memory than there is for it, and goes unproved on its publisher's word.
pub async fn exact_model(
    source: Option<&Source>,
    options: &Options,
    arithmetic: &Arithmetic,
    serial: i64,
    files: &Arc<Checkpoint>,
) -> anyhow::Result<Option<Arc<ExactModel>>> {
    let source = source.filter(|_| files.tensors.is_empty());
    let tensor_bytes = match source {
        None => files.tensor_bytes(),
        Some(source) => {
            let manifest = source.store.get_manifest(&source.policy, serial, &source.keys);
            manifest.await.context("read the manifest")?.tensor_bytes
        }
    };
    if let Err(why) = ask(files, tensor_bytes, options, serial) {
        let Some(error_max) = options.unproved_error_max else {
            return Err(why);
        };
        let why = format!("{why:#}");
        tracing::warn!(
            version = serial,
            why,
            error_max,
            "version goes unproved, on its publisher's word"
        );
        return Ok(None);
    }
    let checkpoint = match source {
        None => files.clone(),
        Some(source) => {
            let read = source.store.materialize(&source.policy, serial, &source.keys, &[]);
            read.await.context("read the weights for the probe")?.checkpoint
        }
    };
    let arithmetic = arithmetic.clone();
    let model = tokio::task::spawn_blocking(move || ExactModel::with_arithmetic(&checkpoint, &arithmetic));
    let model = model
        .await
        .context("the staging thread")?
        .context("build the exact model")?;
    Ok(Some(Arc::new(model)))
}

/// Refuses an exact model that does not fit.
pub fn ask(files: &Checkpoint, tensor_bytes: u64, options: &Options, serial: i64) -> anyhow::Result<()> {
    let size = Size::of_files(&files.files, tensor_bytes).context(
        "our exact model does not know this architecture: set serve.remote.unproved_error_max to serve it unproved",
    )?;
    let need = Need::default()
        .and("its weights", tensor_bytes)
        .and("packed", size.packed_bytes);
    let what = format!("the exact model that proves version {serial}");
    let mend = "raise it if the machine has more, or set serve.remote.unproved_error_max to the difference in nats for \
                which the version's publisher vouches: then it goes unproved";
    need.fits(
        &Limit::setting("serve.remote.probe_bytes_max", options.probe_bytes_max),
        what,
        mend,
    )?;
    Ok(())
}
