//! Quantized copies of published versions. Manifests name their roots; the copies themselves are
//! dropped.

use std::sync::Arc;

use artifact::checkpoint::Checkpoint;
use artifact::manifest::Quantized;
use artifact::quant::{self, Spec};
use artifact::threads::Threads;

/// Which copies every version has. Clones share the list.
#[derive(Debug, Clone, Default)]
pub struct QuantizedCopies {
    specs: Arc<[Spec]>,
    /// The one that the fleet serves.
    pub(super) served: Option<Spec>,
}

impl QuantizedCopies {
    /// One copy of every version for each of `specs`. `served`: the one that the fleet serves.
    pub fn new(specs: &[Spec], served: Option<Spec>) -> Self {
        QuantizedCopies {
            specs: specs.into(),
            served,
        }
    }

    /// What the manifest says about the copies of `checkpoint`. Makes each of them for its root.
    pub(super) async fn for_manifest(&self, checkpoint: Arc<Checkpoint>) -> Result<Vec<Quantized>, super::Error> {
        if self.specs.is_empty() {
            return Ok(vec![]);
        }
        let specs = Arc::clone(&self.specs);
        let named = tokio::task::spawn_blocking(move || {
            let name = |&spec: &Spec| {
                let copy = quant::quantize(&checkpoint, spec, &Threads::ONE)?;
                Ok(Quantized {
                    spec: spec.name().into(),
                    root: copy.root(),
                })
            };
            specs.iter().map(name).collect::<Result<_, quant::Error>>()
        });
        Ok(named.await??)
    }
}
