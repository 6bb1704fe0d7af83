//! A learner's state as bytes, and back, bit by bit.

use super::lora::Lora;
use super::tensors::{from_data, to_data};
use super::{Learner, State};
use crate::learn::optimizer::AdamW;
use anyhow::{Context, bail, ensure};
use artifact::checkpoint::Checkpoint;
use model::exact::Arithmetic;
use runs::publish::run_state::{RunState, StepRecord};
use std::sync::Arc;

impl Learner {
    /// The state after the proposed step, or the present one if none is proposed.
    pub fn run_state(&self, record: StepRecord, random: u64) -> RunState {
        let State { master, optimizer, .. } = self.pending.as_ref().unwrap_or(&self.state);
        RunState {
            record,
            lora: self.lora.as_ref().map(|lora| lora.identity().clone()),
            optimizer_step: optimizer.step,
            random,
            master: to_data(master),
            first: to_data(&optimizer.first),
            second: to_data(&optimizer.second),
        }
    }

    /// Continues from a run state. `checkpoint` is the version that its step made; a master that
    /// does not round to exactly that checkpoint is refused. `base` is the version that an
    /// adapter's run state names.
    pub fn restore(
        checkpoint: Arc<Checkpoint>,
        arithmetic: Arithmetic,
        run_state: &RunState,
        base: Option<Arc<Checkpoint>>,
    ) -> anyhow::Result<Self> {
        let mut learner = match (&run_state.lora, base) {
            (None, _) => Learner::with_arithmetic(checkpoint, arithmetic)?,
            (Some(identity), Some(base)) => {
                let (lora, factors) = Lora::from_identity(&base, identity.clone())?;
                Learner::build(checkpoint, arithmetic, Some((lora, factors)))?
            }
            (Some(identity), None) => bail!("the adapter's base, version {}, was not given", identity.base),
        };
        let master = from_data(&run_state.master, &learner.state.master).context("restore master weights")?;
        learner.state.optimizer = AdamW {
            step: run_state.optimizer_step,
            first: from_data(&run_state.first, &master).context("restore first moments")?,
            second: from_data(&run_state.second, &master).context("restore second moments")?,
        };
        let published = learner.published(&master)?;
        ensure!(
            published.tensors == learner.state.checkpoint.tensors,
            "the master weights of the run state do not round to those of its version"
        );
        learner.state.master = master;
        Ok(learner)
    }
}
