use super::*;
use rand::{Rng, SeedableRng, rngs::StdRng};

fn values(n: usize, seed: u64) -> Vec<f32> {
    let mut rng = StdRng::seed_from_u64(seed);
    (0..n).map(|_| rng.random_range(-1.0f32..1.0)).collect()
}

fn bf16(values: &[f32]) -> Vec<u16> {
    values.iter().map(|&v| half::bf16::from_f32(v).to_bits()).collect()
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|v| v.to_bits()).collect()
}

/// The definition: one chain per output, from the bias on.
fn chain(w: &[f32], bias: &[f32], inputs: usize, x: &[f32]) -> Vec<f32> {
    x.chunks_exact(inputs)
        .flat_map(|x| {
            let outputs = w.chunks_exact(inputs).zip(bias);
            outputs.map(|(w, &bias)| x.iter().zip(w).fold(bias, |sum, (x, w)| x.mul_add(*w, sum)))
        })
        .collect()
}

#[test]
fn a_product_is_the_chain_that_its_definition_says_on_every_instruction_set() {
    // sizes around the panel of 32, the block of 12 rows, the 96 rows of a pass and the depth of 384
    for (outputs, inputs) in [(1, 1), (31, 7), (32, 64), (70, 385), (200, 800)] {
        let w = bf16(&values(outputs * inputs, 1));
        let wide: Vec<f32> = w.iter().map(|&w| f32::from_bits(u32::from(w) << 16)).collect();
        let bias = values(outputs, 2);
        for rows in [0, 1, 2, 3, 5, 12, 13, 16, 97, 110] {
            let x = values(rows * inputs, 3);
            let expected = chain(&wide, &bias, inputs, &x);
            for packed in [Element::Bf16(w.clone()), Element::F32(wide.clone())] {
                let matrix = Matrix::pack(&packed, outputs, inputs);
                for isa in Isa::available() {
                    let mut y = vec![f32::NAN; rows * outputs];
                    matrix.multiply(isa, &x, Some(&Vector::new(&bias)), &mut y);
                    assert_eq!(bits(&y), bits(&expected), "[{outputs}, {inputs}] × {rows} on {isa:?}");
                }
            }
        }
    }
}

#[test]
fn a_packed_matrix_gives_its_rows_back() {
    let w = values(70 * 9, 4);
    let matrix = Matrix::pack(&Element::F32(w.clone()), 70, 9);
    let mut row = [0.0; 9];
    for (output, expected) in w.chunks_exact(9).enumerate() {
        matrix.row(output, &mut row);
        assert_eq!(bits(&row), bits(expected));
    }
}

#[test]
fn exp_is_within_two_units_of_the_true_value() {
    let mut worst = 0.0f64;
    for i in 0..400_000 {
        let x = -87.29 + i as f32 * (87.29 + 88.29) / 400_000.0;
        let truth = f64::from(x).exp();
        let unit = f64::from(f32::from_bits((truth as f32).to_bits() + 1) - truth as f32);
        worst = worst.max((f64::from(exp(x)) - truth).abs() / unit);
    }
    assert!(worst < 2.0, "{worst} units");
    assert_eq!(exp(0.0), 1.0);
    assert_eq!(exp(f32::NEG_INFINITY), 0.0);
    assert_eq!(exp(-88.0), 0.0);
    assert!(exp(200.0).is_finite());
}

#[test]
fn what_happens_along_a_row_has_the_same_bits_on_every_instruction_set() {
    for n in [8, 16, 40, 64, 130] {
        let (x, w) = (values(3 * n, 5), values(n, 6));
        let run = |isa| {
            let mut normed = x.clone();
            rms_norm(isa, &mut normed, &w, 1e-6);
            let mut gated = x.clone();
            swiglu(isa, &mut gated, &normed);
            let mut weights: Vec<f32> = x.iter().map(|x| x * 20.0).collect();
            let sum = softmax(isa, &mut weights);
            let mut turned = x.clone();
            rotate(isa, &mut turned[..n], &w[..n / 2], &w[n / 2..]);
            let mut added = x.clone();
            add(isa, &mut added, &normed);
            add_scaled(isa, &mut added, &gated, 0.37);
            bits(&[normed, gated, weights, vec![sum], turned, added].concat())
        };
        let portable = run(Isa::Portable);
        for isa in Isa::available() {
            assert_eq!(run(isa), portable, "{n} values on {isa:?}");
        }
    }
}

/// Attention over all queries at once, straight from the formula, in f64.
fn attention_in_f64(q: &[f32], k: &[f32], v: &[f32], widths: (usize, usize), window: usize, scale: f64) -> Vec<f64> {
    let (kw, vw) = widths;
    let dot = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(a, b)| f64::from(a * b)).sum::<f64>();
    (0..q.len() / kw)
        .flat_map(|i| {
            let seen: Vec<usize> = ((i + 1).saturating_sub(window)..=i).collect();
            let score = |&j: &usize| (scale * dot(&q[i * kw..][..kw], &k[j * kw..][..kw])).exp();
            let weights: Vec<f64> = seen.iter().map(score).collect();
            let sum: f64 = weights.iter().sum();
            (0..vw)
                .map(move |d| {
                    let parts = seen
                        .iter()
                        .zip(&weights)
                        .map(|(j, weight)| weight * f64::from(v[j * vw + d]));
                    parts.sum::<f64>() / sum
                })
                .collect::<Vec<_>>()
        })
        .collect()
}

#[test]
fn attention_is_the_formula_and_the_same_bits_however_the_queries_arrive() {
    let n = 75;
    for (kw, vw, window) in [(8, 8, usize::MAX), (64, 64, usize::MAX), (24, 40, 33), (16, 16, 5)] {
        let (q, k, v) = (values(n * kw, 7), values(n * kw, 8), values(n * vw, 9));
        let scale = 1.0 / (kw as f32).sqrt();
        let run = |isa: Isa, cuts: &[usize]| {
            let mut keys = Keys::new(n, kw, vw);
            let mut out = vec![f32::NAN; n * vw];
            let mut from = 0;
            for &count in cuts {
                for i in from..from + count {
                    keys.write(i, &k[i * kw..][..kw], &v[i * vw..][..vw]);
                }
                attend(
                    isa,
                    &keys,
                    1,
                    from,
                    count,
                    Some(window),
                    scale,
                    &q[from * kw..],
                    kw,
                    &mut out[from * vw..],
                    vw,
                );
                from += count;
            }
            out
        };
        let whole = run(Isa::Portable, &[n]);
        let truth = attention_in_f64(&q, &k, &v, (kw, vw), window, f64::from(scale));
        for (a, b) in whole.iter().zip(&truth) {
            assert!((f64::from(*a) - b).abs() < 1e-6, "{a} against {b}");
        }
        for isa in Isa::available() {
            for cuts in [vec![n], vec![1; n], vec![32, 43], vec![7, 1, 1, 30, 36], vec![74, 1]] {
                assert_eq!(
                    bits(&run(isa, &cuts)),
                    bits(&whole),
                    "{kw}/{vw} window {window} {cuts:?} on {isa:?}"
                );
            }
        }
    }
}

#[test]
fn heads_that_share_keys_are_heads_of_their_own() {
    let (n, width, heads) = (20, 8, 3);
    let (q, k, v) = (
        values(n * heads * width, 10),
        values(n * width, 11),
        values(n * width, 12),
    );
    let mut keys = Keys::new(n, width, width);
    for i in 0..n {
        keys.write(i, &k[i * width..][..width], &v[i * width..][..width]);
    }
    let run = |heads: usize, q: &[f32], q_stride: usize| {
        let mut out = vec![0.0; n * heads * width];
        attend(
            Isa::best(),
            &keys,
            heads,
            0,
            n,
            None,
            0.5,
            q,
            q_stride,
            &mut out,
            heads * width,
        );
        out
    };
    let together = run(heads, &q, heads * width);
    for head in 0..heads {
        let alone = run(1, &q[head * width..], heads * width);
        for i in 0..n {
            assert_eq!(
                bits(&together[(i * heads + head) * width..][..width]),
                bits(&alone[i * width..][..width])
            );
        }
    }
}
