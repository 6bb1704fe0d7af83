//! What the roles of a stack need of memory for the policy's base. Asked before anything is started.

use anyhow::bail;
use artifact::need::{Limit, Need, gb};
use model::size::Size;

use crate::config::Config;

/// Of Postgres and of the roles without a model.
const OTHERS_BYTES: u64 = 1 << 30;
/// The version that serves, and the next one.
const VERSIONS: u64 = 2;

/// Says what each role needs, and refuses what does not fit. A policy without its base has versions
/// already: then each role asks for itself.
pub fn ask(config: &Config, machine: &Limit) -> anyhow::Result<()> {
    let base = &config.policy.base;
    let size = match Size::of_folder(base) {
        Ok(size) => size,
        Err(error) => {
            eprintln!("memory   not known beforehand: {}: {error}", base.display());
            return Ok(());
        }
    };
    let compute = config.policy.compute;
    let weights = size.weights(|_| true) as f64 / 1e6;
    eprintln!("memory   for {weights:.1} million weights in {}:", base.display());
    let train = runs::memory::needed(&size, &config.trainer, compute);
    eprintln!("  train  {}: {train}", gb(train.bytes()));
    let mut refusals = Vec::new();
    if let Err(error) = runs::memory::ask(&size, &config.trainer, compute, machine) {
        refusals.push(format!("train: {error:#}"));
    }
    let mut serve = Need::default();
    if !config.serve.remote.is_used() {
        serve = serving::memory::needed(&size, VERSIONS, &config.serve, compute);
        eprintln!("  serve  {} for {VERSIONS} versions: {serve}", gb(serve.bytes()));
        let what = format!("serving {VERSIONS} versions of this model");
        if let Err(error) = serving::memory::ask(serve.clone(), &what, &config.serve, machine) {
            refusals.push(format!("serve: {error:#}"));
        }
    }
    let heap = if config.kafka.brokers.is_none() {
        u64::from(config.kafka.heap_mib) << 20
    } else {
        0
    };
    let all = Need::default()
        .and("train", train.bytes())
        .and("serve", serve.bytes())
        .and("Kafka", heap)
        .and("the others", OTHERS_BYTES);
    if refusals.is_empty()
        && let Err(error) = all.fits(
            machine,
            "this stack",
            "take what one role needs less of, or give the roles machines of their own",
        )
    {
        refusals.push(error.to_string());
    }
    if refusals.is_empty() {
        return Ok(());
    }
    bail!(
        "this model does not fit, so nothing was started:\n{}",
        refusals.join("\n")
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    #[test]
    fn a_stack_that_does_not_fit_names_every_role_that_is_too_large() {
        let mut config = Config::default();
        config.policy.base = Path::new(env!("CARGO_MANIFEST_DIR")).join("demo/models/base");
        ask(&config, &Limit::setting("the machine's memory", 24 << 30)).unwrap();
        let why = ask(&config, &Limit::setting("the machine's memory", 10 << 20))
            .unwrap_err()
            .to_string();
        assert!(
            why.contains("train: training this model needs") && why.contains("serve: serving 2 versions"),
            "{why}"
        );
        // each fits, all together do not
        let train = runs::memory::needed(
            &Size::of_folder(&config.policy.base).unwrap(),
            &config.trainer,
            config.policy.compute,
        );
        let why = ask(&config, &Limit::setting("the machine's memory", train.bytes()))
            .unwrap_err()
            .to_string();
        assert!(why.contains("this stack needs"), "{why}");
        config.policy.base = "/nowhere".into();
        ask(&config, &Limit::setting("the machine's memory", 1)).unwrap();
    }
}
