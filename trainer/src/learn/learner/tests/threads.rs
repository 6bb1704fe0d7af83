//! Steps have the same bits on any number of threads.

use super::*;

/// `threads` that share even the smallest work.
fn arithmetic(threads: usize) -> Arithmetic {
    let arithmetic = Arithmetic::new(Compute::F32, threads).unwrap();
    Arithmetic {
        threads: arithmetic.threads.eager(),
        ..arithmetic
    }
}

/// Three steps, each from two cohorts that fill it in several micro-batches.
fn three_steps(mut learner: Learner) -> (RunState, Vec<[f64; 4]>) {
    assert!(matches!(learner.gradients, Gradients::Ours(_)));
    let settings = StepSettings {
        micro_batch_tokens: 64,
        ..StepSettings::default()
    };
    let steps = (0..3).map(|_| {
        let cohort = samples(&learner, 16);
        let rewards = rewards(&cohort);
        for part in [0..7, 7..16] {
            let (samples, rewards) = (&cohort[part.clone()], &rewards[part]);
            learner.accumulate(samples, rewards, &settings, &limits()).unwrap();
        }
        let Outcome::Proposed(proposal) = learner.finish(&settings, &limits()).unwrap() else {
            panic!("no step");
        };
        learner.accept();
        let Metrics {
            loss,
            gradient_norm,
            kl,
            entropy,
            ..
        } = proposal.metrics;
        [loss, gradient_norm, kl, entropy]
    });
    let steps = steps.collect();
    (learner.run_state(record(), 0), steps)
}

fn compare(learner: impl Fn(Arithmetic) -> Learner) {
    let (alone, metrics) = three_steps(learner(arithmetic(1)));
    for threads in [2, 4] {
        let (shared, shared_metrics) = three_steps(learner(arithmetic(threads)));
        assert_eq!(shared_metrics, metrics, "{threads} threads");
        assert!(shared.master == alone.master, "{threads} threads: master weights");
        assert!(shared.first == alone.first, "{threads} threads: first moments");
        assert!(shared.second == alone.second, "{threads} threads: second moments");
    }
}

#[test]
fn steps_of_all_weights_have_the_same_bits_on_one_two_and_four_threads() {
    let checkpoint = Arc::new(random_checkpoint(&tiny(), 31));
    compare(|arithmetic| Learner::with_arithmetic(Arc::clone(&checkpoint), arithmetic).unwrap());
}

#[test]
fn steps_of_an_adapter_have_the_same_bits_on_one_two_and_four_threads() {
    let base = Arc::new(random_checkpoint(&tiny(), 32));
    let config = model::lora::Config {
        r: 4,
        ..model::lora::Config::default()
    };
    compare(|arithmetic| Learner::with_lora(Arc::clone(&base), arithmetic, (1, None), &config, 7).unwrap());
}
