//! AdamW (Loshchilov and Hutter 2019) over named fp32 tensors, and clipping by the global norm.
//!
//! Written here rather than taken from libtorch because its state belongs to the run state: moments
//! and update count are saved and restored bit by bit. An update makes new tensors and leaves the
//! old ones alone, so a step that is never committed can be forgotten.

use autograd::Parameters;
use runs::settings::OptimizerSettings;
use tch::{Kind, Tensor};

/// Both moments of every parameter, and the number of updates.
#[derive(Debug)]
pub struct AdamW {
    pub step: i64,
    pub first: Parameters,
    pub second: Parameters,
}

impl AdamW {
    /// Fresh moments: zeros in the shape of each parameter.
    pub fn new(parameters: &Parameters) -> Self {
        let zeros = || parameters.iter().map(|(n, t)| (n.clone(), t.zeros_like())).collect();
        AdamW {
            step: 0,
            first: zeros(),
            second: zeros(),
        }
    }

    /// One update: the new parameters and the new state. `gradients` names every parameter, already
    /// clipped.
    pub fn updated(
        &self,
        parameters: &Parameters,
        gradients: &Parameters,
        settings: &OptimizerSettings,
    ) -> (Parameters, AdamW) {
        let _no_grad = tch::no_grad_guard();
        let OptimizerSettings {
            learning_rate,
            beta1,
            beta2,
            epsilon,
            weight_decay,
            ..
        } = *settings;
        let step = self.step + 1;
        let t = step as f64;
        let (bias_correction1, bias_correction2) = (1.0 - beta1.powf(t), 1.0 - beta2.powf(t));
        let mut next = AdamW {
            step,
            first: Parameters::new(),
            second: Parameters::new(),
        };
        let mut updated = Parameters::new();
        for (name, parameter) in parameters {
            let gradient = &gradients[name];
            let first = &self.first[name] * beta1 + gradient * (1.0 - beta1);
            let second = &self.second[name] * beta2 + gradient.square() * (1.0 - beta2);
            let scale = (&second / bias_correction2).sqrt() + epsilon;
            let decay = if parameter.dim() >= 2 { weight_decay } else { 0.0 };
            let value = parameter * (1.0 - learning_rate * decay) - &first / scale * (learning_rate / bias_correction1);
            updated.insert(name.clone(), value);
            next.first.insert(name.clone(), first);
            next.second.insert(name.clone(), second);
        }
        (updated, next)
    }
}

/// Global L2 norm over all tensors, summed in f64.
pub fn norm(gradients: &Parameters) -> f64 {
    gradients
        .values()
        .map(|g| g.to_kind(Kind::Double).square().sum(Kind::Double).double_value(&[]))
        .sum::<f64>()
        .sqrt()
}

/// Scales gradients whose global norm is `norm` down to at most `norm_max`.
pub fn clip(gradients: &mut Parameters, norm: f64, norm_max: f64) {
    if norm > norm_max {
        let scale = norm_max / norm;
        for gradient in gradients.values_mut() {
            *gradient = &*gradient * scale;
        }
    }
}

/// The first parameter with a value that is not finite.
pub fn first_not_finite(parameters: &Parameters) -> Option<&str> {
    parameters
        .iter()
        .find(|(_, t)| !all_finite(t))
        .map(|(name, _)| name.as_str())
}

fn all_finite(tensor: &Tensor) -> bool {
    tensor.isfinite().all().int64_value(&[]) == 1
}

#[cfg(test)]
mod tests {
    use super::*;

    fn one(values: &[f32]) -> Parameters {
        Parameters::from([("w".to_string(), Tensor::from_slice(values))])
    }
    fn values(parameters: &Parameters) -> Vec<f32> {
        Vec::<f32>::try_from(&parameters["w"]).unwrap()
    }
    fn close(got: &[f32], want: &[f64]) {
        for (g, w) in got.iter().zip(want) {
            assert!((f64::from(*g) - w).abs() < 1e-6, "{got:?} against {want:?}");
        }
    }

    #[test]
    fn two_updates_match_a_computation_by_hand() {
        let settings = OptimizerSettings {
            learning_rate: 0.1,
            beta1: 0.9,
            beta2: 0.99,
            ..OptimizerSettings::default()
        };
        let start = one(&[1.0]);
        let (p1, s1) = AdamW::new(&start).updated(&start, &one(&[0.5]), &settings);
        close(&values(&p1), &[0.9]); // the first step moves by the learning rate
        let (p2, s2) = s1.updated(&p1, &one(&[-0.25]), &settings);
        // m = 0.9·0.05 − 0.025 = 0.02, /0.19; v = 0.99·0.0025 + 0.000625 = 0.0031, /0.0199
        let want = 0.9 - 0.1 * (0.02 / 0.19) / (0.0031f64 / 0.0199).sqrt();
        close(&values(&p2), &[want]);
        close(&values(&s2.first), &[0.02]);
        close(&values(&s2.second), &[0.0031]);
        assert_eq!(s2.step, 2);
        close(&values(&start), &[1.0]); // the old tensors are untouched
    }

    #[test]
    fn decay_shrinks_matrices_and_spares_vectors() {
        let settings = OptimizerSettings {
            learning_rate: 0.1,
            weight_decay: 0.5,
            ..OptimizerSettings::default()
        };
        let start = Parameters::from([
            ("m".to_string(), Tensor::from_slice(&[2.0f32]).view([1, 1])),
            ("v".to_string(), Tensor::from_slice(&[2.0f32])),
        ]);
        let still: Parameters = start.iter().map(|(n, t)| (n.clone(), t.zeros_like())).collect();
        let (moved, _) = AdamW::new(&start).updated(&start, &still, &settings);
        close(&[moved["m"].double_value(&[0, 0]) as f32], &[1.9]);
        close(&[moved["v"].double_value(&[0]) as f32], &[2.0]);
    }

    #[test]
    fn clipping_scales_only_gradients_that_are_too_long() {
        let mut long = one(&[3.0, 4.0]);
        assert_eq!(norm(&long), 5.0);
        clip(&mut long, 5.0, 1.0);
        close(&values(&long), &[0.6, 0.8]);
        let mut short = one(&[0.3, 0.4]);
        clip(&mut short, 0.5, 1.0);
        close(&values(&short), &[0.3, 0.4]);
    }

    #[test]
    fn values_that_are_not_finite_are_found_by_name() {
        assert_eq!(first_not_finite(&one(&[1.0, f32::NAN])), Some("w"));
        assert_eq!(first_not_finite(&one(&[1.0, 2.0])), None);
    }
}
