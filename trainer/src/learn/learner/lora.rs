//! Low-rank adaptation (Hu et al. 2021): the optimizer trains two small factors of each adapted
//! matrix, W = W₀ + s · B · A.
//!
//! The factors are published; W is sampled from and computed with, in f32. If the base is an adapter itself, W is
//! published, rounded to its dtype. The gradients of the factors follow from the gradient of W: dA = s · Bᵀ · dW and dB = s
//! · dW · Aᵀ. Rounding passes gradients through, as for whole weights. W₀ is not copied; it is the
//! base version's bytes.

use super::tensors::{tensor, to_data};
use anyhow::{Context, ensure};
use artifact::checkpoint::Checkpoint;
use artifact::manifest::Parent;
use autograd::Parameters;
use model::lora::{Adapter, Config, merged};
use runs::publish::run_state;
use std::collections::BTreeSet;
use std::sync::Arc;

/// The adapted matrices, and the base that the product is added to. The factors are the learner's
/// master.
#[derive(Debug)]
pub(super) struct Lora {
    base: Arc<Checkpoint>,
    /// The base's version has all weights, so its adapters are versions of their own.
    is_whole: bool,
    identity: run_state::Lora,
    modules: Vec<Module>,
    /// Names of the weights that accumulate gradients.
    weights: BTreeSet<String>,
}

#[derive(Debug)]
struct Module {
    weight: String,
    a: String,
    b: String,
    scale: f64,
}

impl Lora {
    /// The adapter of version `serial`, which `adapts` another one, if it has these settings; else a new one, for which
    /// the version is merged if it is an adapter itself. Also its initial factors.
    pub fn fresh(
        version: &Arc<Checkpoint>,
        (serial, adapts): (i64, Option<Parent>),
        config: &Config,
        seed: u64,
    ) -> anyhow::Result<(Self, Parameters)> {
        if let (Some(adapter), Some(of)) = (Adapter::of_version(version)?, adapts) {
            let base = Arc::new(version.base());
            let new = Adapter::fresh(config.clone(), &base, seed).context("start an adapter")?;
            if new.is_shaped_like(&adapter)? {
                let identity = run_state::Lora {
                    base: of.version,
                    base_root: of.root,
                    config: config.clone(),
                };
                let (lora, _) = Self::new(base, true, identity, seed)?;
                let factors = adapter.to_tensors().into_iter();
                let factors = factors.map(|(name, data)| Ok((name, tensor(&data)?)));
                return Ok((lora, factors.collect::<anyhow::Result<_>>()?));
            }
        }
        let base = merged(version).context("merge the base")?;
        let identity = run_state::Lora {
            base: serial,
            base_root: base.root(),
            config: config.clone(),
        };
        Self::new(base, !version.has_adapter(), identity, seed)
    }

    /// The adapter of a run state, with factors of the right shapes.
    pub fn from_identity(version: &Arc<Checkpoint>, identity: run_state::Lora) -> anyhow::Result<(Self, Parameters)> {
        let base = merged(version).context("merge the base")?;
        ensure!(
            base.root() == identity.base_root,
            "version {} does not have the weights that the adapter was trained on",
            identity.base
        );
        Self::new(base, !version.has_adapter(), identity, 0)
    }

    fn new(
        base: Arc<Checkpoint>,
        is_whole: bool,
        identity: run_state::Lora,
        seed: u64,
    ) -> anyhow::Result<(Self, Parameters)> {
        let adapter = Adapter::fresh(identity.config.clone(), &base, seed)?;
        let module = |name: &String| {
            let (_, scale) = identity.config.of(name)?;
            Ok(Module {
                weight: format!("{name}.weight"),
                a: format!("{name}.lora_A.weight"),
                b: format!("{name}.lora_B.weight"),
                scale: f64::from(scale),
            })
        };
        let modules: Vec<Module> = adapter.pairs.keys().map(module).collect::<anyhow::Result<_>>()?;
        let tensors = adapter.to_tensors().into_iter();
        let factors = tensors.map(|(name, data)| Ok((name, tensor(&data)?)));
        let factors = factors.collect::<anyhow::Result<_>>()?;
        let lora = Lora {
            base,
            is_whole,
            weights: modules.iter().map(|module| module.weight.clone()).collect(),
            modules,
            identity,
        };
        Ok((lora, factors))
    }

    pub fn identity(&self) -> &run_state::Lora {
        &self.identity
    }

    /// Whether a weight of the model is adapted.
    pub fn adapts(&self, weight: &str) -> bool {
        self.weights.contains(weight)
    }

    /// Gradients of the factors from those of the weights.
    pub fn gradients(&self, factors: &Parameters, weights: &Parameters) -> Parameters {
        let _no_grad = tch::no_grad_guard();
        let mut gradients = Parameters::new();
        for module in &self.modules {
            let (a, b) = (&factors[&module.a], &factors[&module.b]);
            let weight = &weights[&module.weight];
            gradients.insert(module.a.clone(), b.tr().matmul(weight) * module.scale);
            gradients.insert(module.b.clone(), weight.matmul(&a.tr()) * module.scale);
        }
        gradients
    }

    /// The version that its versions adapt. `None`: they have all weights.
    pub fn base(&self) -> Option<Parent> {
        self.is_whole.then_some(Parent {
            version: self.identity.base,
            root: self.identity.base_root,
        })
    }

    /// The version that the factors make.
    pub fn published(&self, factors: &Parameters) -> anyhow::Result<Checkpoint> {
        let adapter =
            Adapter::from_tensors(self.identity.config.clone(), &to_data(factors)).map_err(anyhow::Error::msg)?;
        match self.is_whole {
            true => {
                let adapter = adapter.version_of(&self.base).context("put the adapter together")?;
                Ok(self.base.with_adapter(&adapter))
            }
            false => adapter.merge(&self.base).context("merge the adapter"),
        }
    }
}
