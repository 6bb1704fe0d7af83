//! What a published step adds to the metrics of the process.

use crate::cohort::Timings;
use crate::learn::learner::Metrics;
use runs::publish;

/// `tail_seconds`: from the full cohort to the publication.
pub(super) fn record(
    line: &str,
    metrics: &Metrics,
    is_outside: bool,
    timings: Timings,
    publish: publish::Timings,
    tail_seconds: f64,
) {
    let line = line.to_string();
    metrics::counter!("springtide_train_steps_total", "line" => line.clone()).increment(1);
    metrics::counter!("springtide_train_trajectories_total", "line" => line.clone())
        .increment(metrics.trajectories as u64);
    for (name, count) in [
        ("springtide_train_turns_total", metrics.sequences),
        ("springtide_train_tokens_total", metrics.tokens),
        ("springtide_train_stale_tokens_total", metrics.stale.tokens),
    ] {
        metrics::counter!(name, "line" => line.clone()).increment(count as u64);
    }
    metrics::histogram!("springtide_train_compute_seconds", "line" => line.clone()).record(metrics.seconds);
    metrics::histogram!("springtide_train_step_seconds", "line" => line.clone()).record(tail_seconds);
    let phases = [
        ("wait", timings.wait),
        ("collect", timings.collect),
        ("compute_tail", timings.compute_tail),
        ("guard", timings.guard),
        ("encode", publish.encode),
        ("upload", publish.upload),
        ("commit", publish.commit),
    ];
    for (phase, seconds) in phases {
        metrics::histogram!("springtide_train_phase_seconds", "line" => line.clone(), "phase" => phase).record(seconds);
    }
    let mismatch = &metrics.mismatch;
    let gauges = [
        ("springtide_train_loss", metrics.loss),
        ("springtide_train_kl_nats", metrics.kl),
        ("springtide_train_gradient_norm", metrics.gradient_norm),
        ("springtide_train_entropy_nats", metrics.entropy),
        ("springtide_train_reward_mean", metrics.reward_mean),
    ];
    for (name, value) in gauges {
        metrics::gauge!(name, "line" => line.clone()).set(value);
    }
    if is_outside {
        return; // nothing was compared
    }
    let compared = [
        ("springtide_train_parity_difference_max_nats", mismatch.difference_max),
        ("springtide_train_effective_sample_ratio", mismatch.ess),
        (
            "springtide_train_corrected_truncated_share",
            metrics.correction.truncated,
        ),
        (
            "springtide_train_corrected_effective_sample_ratio",
            metrics.correction.ess,
        ),
    ];
    for (name, value) in compared {
        metrics::gauge!(name, "line" => line.clone()).set(value);
    }
    for (engine, of) in [("ours", mismatch), ("remote", &metrics.remote)] {
        let labels = [("line", line.clone()), ("engine", engine.to_owned())];
        metrics::gauge!("springtide_train_mismatch_k1_nats", &labels).set(of.k1);
        metrics::gauge!("springtide_train_mismatch_k3_nats", &labels).set(of.k3);
        for (quantile, value) in [
            ("0.5", of.difference_p50),
            ("0.99", of.difference_p99),
            ("1", of.difference_max),
        ] {
            let [line, engine] = labels.clone();
            let labels = [line, engine, ("quantile", quantile.to_owned())];
            metrics::gauge!("springtide_train_mismatch_difference_nats", &labels).set(value);
        }
    }
}
