//! Low-rank adaptation (Hu et al. 2021): the optimiser moves two small factors of each adapted matrix, W = W₀ + s · B · A.
//!
//! What is published, sampled from and computed with is W, rounded to its dtype like any version's weights, so everything
//! that is exact stays so. A factor's gradient follows from the gradient of W: dA = s · Bᵀ · dW and dB = s · dW · Aᵀ. The
//! rounding passes gradients through, as it does for whole weights. W₀ is not copied: it is the base version's bytes.

use super::state::{tensor, to_data};
use crate::checkpoint;
use anyhow::{Context, ensure};
use policy::image::Image;
use policy::lora::{Adapter, Config};
use policy::network::Parameters;
use std::collections::BTreeSet;
use std::sync::Arc;

/// What is adapted, and to which base the product is added. The factors are the learner's master.
#[derive(Debug)]
pub(super) struct Lora {
    base: Arc<Image>,
    identity: checkpoint::Lora,
    modules: Vec<Module>,
    /// Names of the weights that gather gradients.
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
    /// A new adapter of version `serial`, and the factors that it starts with.
    pub fn fresh(base: Arc<Image>, serial: i64, config: &Config, seed: u64) -> anyhow::Result<(Self, Parameters)> {
        let identity = checkpoint::Lora {
            base: serial,
            base_root: base.root(),
            config: config.clone(),
        };
        Self::begin(base, identity, seed)
    }

    /// The adapter that a checkpoint names, with factors of the right shapes.
    pub fn named(base: Arc<Image>, identity: checkpoint::Lora) -> anyhow::Result<(Self, Parameters)> {
        ensure!(
            base.root() == identity.base_root,
            "version {} does not have the weights that the adapter was begun on",
            identity.base
        );
        Self::begin(base, identity, 0)
    }

    fn begin(base: Arc<Image>, identity: checkpoint::Lora, seed: u64) -> anyhow::Result<(Self, Parameters)> {
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
            weights: modules.iter().map(|module| module.weight.clone()).collect(),
            modules,
            identity,
        };
        Ok((lora, factors))
    }

    pub fn identity(&self) -> &checkpoint::Lora {
        &self.identity
    }

    /// Whether a weight of the network is adapted.
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

    /// The version that the factors make.
    pub fn published(&self, factors: &Parameters) -> anyhow::Result<Image> {
        let adapter =
            Adapter::from_tensors(self.identity.config.clone(), &to_data(factors)).map_err(anyhow::Error::msg)?;
        adapter.merge(&self.base).context("merge the adapter")
    }
}
