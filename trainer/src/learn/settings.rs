//! `[trainer.realtime.step]`: how one step is computed. Plain data that also the build without
//! libtorch reads.

use crate::learn::correction::Correction;
use crate::learn::loss::{Aggregation, Loss};
use crate::learn::optimizer::OptimizerSettings;
use serde::{Deserialize, Serialize};

/// One optimizer step.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct StepSettings {
    /// Default: `reinforce_is` with its weight truncated at 2.
    pub loss: Loss,
    /// For tokens that an engine with other arithmetic sampled; default: `tis` with a cap of 2. It
    /// changes nothing about tokens of our own engine.
    pub correction: Correction,
    /// Default: `seq-mean-token-sum`.
    pub aggregation: Aggregation,
    #[serde(rename = "optimiser")]
    pub optimizer: OptimizerSettings,
    /// Tokens that go through the model together; default 4096. Changes memory, not results.
    pub micro_batch_tokens: usize,
    /// What a forward pass may keep for its gradient besides each layer's input, in bytes; default
    /// 1073741824 (1 GiB). What does not fit is computed again. Changes memory and speed, not results.
    pub activation_bytes_max: u64,
}

impl Default for StepSettings {
    fn default() -> Self {
        StepSettings {
            loss: Loss::ReinforceIs { cap: 2.0 },
            correction: Correction::Tis { cap: 2.0 },
            aggregation: Aggregation::default(),
            optimizer: OptimizerSettings::default(),
            micro_batch_tokens: 4096,
            activation_bytes_max: 1 << 30,
        }
    }
}

impl StepSettings {
    /// Refuses constants that make no sense. The text begins with the field.
    pub fn check(&self) -> Result<(), String> {
        self.optimizer.check().map_err(|why| format!("optimiser.{why}"))?;
        if self.micro_batch_tokens == 0 {
            return Err("micro_batch_tokens must be above 0".into());
        }
        self.correction.check().map_err(str::to_owned)?;
        self.loss.check().map_err(str::to_owned)
    }
}
