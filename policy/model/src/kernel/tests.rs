use super::*;
use rand::{Rng, SeedableRng, rngs::StdRng};

fn values(n: usize, seed: u64) -> Vec<f32> {
    let mut rng = StdRng::seed_from_u64(seed);
    (0..n).map(|_| rng.random_range(-1.0f32..1.0)).collect()
}

fn bytes(bits: &[u16]) -> Vec<[u8; 2]> {
    bits.iter().map(|bits| bits.to_le_bytes()).collect()
}

fn bf16_bits(values: &[f32]) -> Vec<u16> {
    values.iter().map(|&v| half::bf16::from_f32(v).to_bits()).collect()
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|v| v.to_bits()).collect()
}

fn wide(bits: u16) -> f32 {
    f32::from_bits(u32::from(bits) << 16)
}

/// The definition for bf16: the odd k of a pair before the even one, and a subnormal sum becomes 0.
fn chain_of_pairs(w: &[f32], bias: &[f32], inputs: usize, x: &[f32]) -> Vec<f32> {
    let add = |sum: f32, x: f32, w: f32| {
        let sum = x.mul_add(w, sum);
        if sum.is_subnormal() { 0.0f32.copysign(sum) } else { sum }
    };
    let dot = |x: &[f32], w: &[f32], bias: f32| {
        x.chunks(2).zip(w.chunks(2)).fold(bias, |sum, (x, w)| match (x, w) {
            ([x0, x1], [w0, w1]) => add(add(sum, *x1, *w1), *x0, *w0),
            _ => add(sum, x[0], w[0]),
        })
    };
    x.chunks_exact(inputs)
        .flat_map(|x| w.chunks_exact(inputs).zip(bias).map(|(w, &bias)| dot(x, w, bias)))
        .collect()
}

/// The definition: one chain per output, starting at the bias.
fn chain(w: &[f32], bias: &[f32], inputs: usize, x: &[f32]) -> Vec<f32> {
    x.chunks_exact(inputs)
        .flat_map(|x| {
            let outputs = w.chunks_exact(inputs).zip(bias);
            outputs.map(|(w, &bias)| x.iter().zip(w).fold(bias, |sum, (x, w)| x.mul_add(*w, sum)))
        })
        .collect()
}

/// Sizes around the panel of 32, the block of 12 rows, the 96 rows of a pass, the depth of 384, and
/// odd ones.
const SIZES: [(usize, usize); 5] = [(1, 1), (31, 7), (32, 64), (70, 385), (200, 800)];
const ROWS: [usize; 10] = [0, 1, 2, 3, 5, 12, 13, 16, 97, 110];

#[test]
fn a_product_equals_its_definition_on_every_instruction_set() {
    for (outputs, inputs) in SIZES {
        let w = bf16_bits(&values(outputs * inputs, 1));
        let wide: Vec<f32> = w.iter().map(|&w| wide(w)).collect();
        let bias = values(outputs, 2);
        for rows in ROWS {
            let x = values(rows * inputs, 3);
            let x_rounded: Vec<f32> = x.iter().map(|&x| half::bf16::from_f32(x).to_f32()).collect();
            for (compute, expected) in [
                (Compute::F32, chain(&wide, &bias, inputs, &x)),
                (Compute::Bf16, chain_of_pairs(&wide, &bias, inputs, &x_rounded)),
            ] {
                for values in [Element::Bf16(&bytes(&w)), Element::F32(&wide)] {
                    let matrix = Matrix::pack(values, outputs, inputs, compute, &Threads::ONE);
                    for isa in Isa::available() {
                        let mut y = vec![f32::NAN; rows * outputs];
                        matrix.multiply(isa, &Threads::ONE, &x, Some(&Vector::new(&bias)), &mut y);
                        assert_eq!(
                            bits(&y),
                            bits(&expected),
                            "{compute:?} [{outputs}, {inputs}] × {rows} on {isa:?}"
                        );
                    }
                }
            }
        }
    }
}

#[test]
fn threads_change_no_bit_of_a_product() {
    let both = [2, 3].map(|count| Threads::new(count).unwrap().eager());
    for (outputs, inputs) in SIZES {
        let w = values(outputs * inputs, 1);
        let bias = Vector::new(&values(outputs, 2));
        for compute in [Compute::F32, Compute::Bf16] {
            let matrix = Matrix::pack(Element::F32(&w), outputs, inputs, compute, &Threads::ONE);
            for rows in ROWS.into_iter().chain([300, 613]) {
                let x = values(rows * inputs, 3);
                let run = |threads: &Threads| {
                    let mut y = vec![f32::NAN; rows * outputs];
                    matrix.multiply(Isa::best(), threads, &x, Some(&bias), &mut y);
                    bits(&y)
                };
                for threads in &both {
                    assert_eq!(
                        run(threads),
                        run(&Threads::ONE),
                        "{compute:?} [{outputs}, {inputs}] × {rows} on {} threads",
                        threads.count()
                    );
                }
            }
        }
    }
}

#[test]
fn packing_on_threads_puts_every_weight_where_it_belongs() {
    // Two packing jobs and a part of a third.
    let (outputs, inputs) = (2 * 256 + 45, 131);
    let w = bf16_bits(&values(outputs * inputs, 1));
    let wide: Vec<f32> = w.iter().map(|&w| wide(w)).collect();
    for compute in [Compute::F32, Compute::Bf16] {
        for threads in [Threads::ONE, Threads::new(3).unwrap()] {
            for values in [Element::Bf16(&bytes(&w)), Element::F32(&wide)] {
                let matrix = Matrix::pack(values, outputs, inputs, compute, &threads);
                let mut row = vec![f32::NAN; inputs];
                for (output, expected) in wide.chunks(inputs).enumerate() {
                    matrix.row(output, &mut row);
                    assert_eq!(bits(&row), bits(expected), "{compute:?}, output {output}");
                }
            }
        }
    }
}

#[test]
fn pairs_underflow_to_zero_and_overflow_to_infinity_alike_on_every_instruction_set() {
    // Every exponent of a normal bf16.
    let (outputs, inputs, rows) = (32, 64, 5);
    let any = |n: usize, seed: u64| -> Vec<f32> {
        let mut rng = StdRng::seed_from_u64(seed);
        let normal = |bits: &u16| (1..255).contains(&(bits >> 7 & 0xff));
        let bits = std::iter::repeat_with(|| rng.random::<u16>()).filter(normal);
        bits.take(n).map(wide).collect()
    };
    let matrix = Matrix::pack(
        Element::F32(&any(outputs * inputs, 1)),
        outputs,
        inputs,
        Compute::Bf16,
        &Threads::ONE,
    );
    for part in 0..inputs / 2 {
        // A few terms at a time, because the sum of all would be infinite.
        let mut x = vec![0.0; rows * inputs];
        for (row, any) in x.chunks_exact_mut(inputs).zip(any(rows * 2, part as u64).chunks(2)) {
            row[2 * part..][..2].copy_from_slice(any);
        }
        let run = |isa| {
            let mut y = vec![0.0; rows * outputs];
            matrix.multiply(isa, &Threads::ONE, &x, None, &mut y);
            y
        };
        let portable = run(Isa::PORTABLE);
        assert!(portable.iter().all(|y| !y.is_subnormal()));
        for isa in Isa::available() {
            assert_eq!(bits(&run(isa)), bits(&portable), "{isa:?}");
        }
    }
}

#[test]
fn bf16_is_the_nearest_one_and_never_subnormal() {
    for seed in 0..200_000u32 {
        let x = f32::from_bits(seed.wrapping_mul(2_654_435_761));
        let nearest = half::bf16::from_f32(x);
        let expected = match x.is_subnormal() {
            true => 0.0f32.copysign(x),
            false => nearest.to_f32(),
        };
        let got = wide(bf16(x) as u16);
        assert!(
            got.to_bits() == expected.to_bits() || (got.is_nan() && x.is_nan()),
            "{x:e}: {got:e}"
        );
    }
    for (x, expected) in [
        (f32::INFINITY, 0x7f80),
        (f32::MAX, 0x7f80),
        (f32::NAN, 0x7fc0),
        (-0.0, 0x8000),
    ] {
        assert_eq!(bf16(x), expected, "{x}");
    }
}

#[test]
fn a_packed_matrix_returns_its_rows() {
    for inputs in [9, 16] {
        let rounded = bf16_bits(&values(70 * inputs, 4));
        let w: Vec<f32> = rounded.iter().map(|&w| wide(w)).collect();
        for compute in [Compute::F32, Compute::Bf16] {
            for values in [Element::F32(&w), Element::Bf16(&bytes(&rounded))] {
                let matrix = Matrix::pack(values, 70, inputs, compute, &Threads::ONE);
                let mut row = vec![0.0; inputs];
                for (output, expected) in w.chunks_exact(inputs).enumerate() {
                    matrix.row(output, &mut row);
                    assert_eq!(bits(&row), bits(expected));
                }
            }
        }
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
fn row_operations_have_the_same_bits_on_every_instruction_set() {
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
            let mut pairs = vec![0; 3 * n.div_ceil(2)];
            round_pairs(isa, &x, n, &mut pairs);
            let values = bits(&[normed, gated, weights, vec![sum], turned, added].concat());
            [values, pairs].concat()
        };
        let portable = run(Isa::PORTABLE);
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
fn attention_follows_the_formula_and_chunks_do_not_change_its_bits() {
    let n = 75;
    for (kw, vw, window) in [
        (8, 8, usize::MAX),
        (64, 64, usize::MAX),
        (24, 40, 33),
        (16, 16, 5),
        (7, 9, 20),
    ] {
        let (q, k, v) = (values(n * kw, 7), values(n * kw, 8), values(n * vw, 9));
        let scale = 1.0 / (kw as f32).sqrt();
        let truth = attention_in_f64(&q, &k, &v, (kw, vw), window, f64::from(scale));
        for (compute, tolerance) in [(Compute::F32, 1e-6), (Compute::Bf16, 1e-2)] {
            let run = |isa: Isa, lengths: &[usize]| {
                // An earlier sequence left its keys and values.
                let mut kv = KvHead::new(n, kw, vw, compute);
                for i in 0..n {
                    kv.write(i, &vec![3.0; kw], &vec![-5.0; vw]);
                }
                let mut out = vec![f32::NAN; n * vw];
                let mut from = 0;
                for &count in lengths {
                    for i in from..from + count {
                        kv.write(i, &k[i * kw..][..kw], &v[i * vw..][..vw]);
                    }
                    let queries = Queries {
                        heads: 1,
                        from,
                        count,
                        window: Some(window),
                        scale,
                        q: &q[from * kw..],
                        q_stride: kw,
                    };
                    attend(isa, &kv, &queries, &mut out[from * vw..], vw);
                    from += count;
                }
                out
            };
            let unsplit = run(Isa::PORTABLE, &[n]);
            for (a, b) in unsplit.iter().zip(&truth) {
                assert!((f64::from(*a) - b).abs() < tolerance, "{compute:?}: {a} against {b}");
            }
            for isa in Isa::available() {
                for lengths in [vec![n], vec![1; n], vec![32, 43], vec![7, 1, 1, 30, 36], vec![74, 1]] {
                    assert_eq!(
                        bits(&run(isa, &lengths)),
                        bits(&unsplit),
                        "{compute:?} {kw}/{vw} window {window} {lengths:?} on {isa:?}"
                    );
                }
            }
        }
    }
}

#[test]
fn a_copied_head_continues_with_the_same_bits_as_its_original() {
    let (n, width) = (45, 40);
    let (q, k, v) = (values(width, 7), values(n * width, 8), values(n * width, 9));
    for compute in [Compute::F32, Compute::Bf16] {
        for held in [1, 31, 32, 33, 44] {
            let mut kv = KvHead::new(64, width, width, compute);
            let mut copy = KvHead::new(96, width, width, compute);
            let write = |kv: &mut KvHead, i: usize| kv.write(i, &k[i * width..][..width], &v[i * width..][..width]);
            (0..held).for_each(|i| write(&mut kv, i));
            copy.copy_from(&kv, held);
            let run = |kv: &mut KvHead| {
                (held..n).for_each(|i| write(kv, i));
                let queries = Queries {
                    heads: 1,
                    from: n - 1,
                    count: 1,
                    window: None,
                    scale: 0.5,
                    q: &q,
                    q_stride: width,
                };
                let mut out = vec![0.0; width];
                attend(Isa::best(), kv, &queries, &mut out, width);
                bits(&out)
            };
            assert_eq!(run(&mut copy), run(&mut kv), "{compute:?}, {held} copied");
        }
    }
}

#[test]
fn heads_that_share_keys_do_not_affect_each_other() {
    let (n, width, heads) = (20, 8, 3);
    let (q, k, v) = (
        values(n * heads * width, 10),
        values(n * width, 11),
        values(n * width, 12),
    );
    let mut kv = KvHead::new(n, width, width, Compute::F32);
    for i in 0..n {
        kv.write(i, &k[i * width..][..width], &v[i * width..][..width]);
    }
    let run = |heads: usize, q: &[f32], q_stride: usize| {
        let mut out = vec![0.0; n * heads * width];
        let queries = Queries {
            heads,
            from: 0,
            count: n,
            window: None,
            scale: 0.5,
            q,
            q_stride,
        };
        attend(Isa::best(), &kv, &queries, &mut out, heads * width);
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

#[test]
fn products_over_rows_are_one_chain_of_multiply_adds_per_output() {
    // Around the blocks of 12 and 32 columns, and more rows than are packed at once.
    for (rows, outputs, inputs) in [(1, 1, 1), (5, 12, 32), (515, 13, 33), (1030, 25, 7)] {
        let (a, b) = (values(rows * (outputs + 3), 1), values(rows * inputs, 2));
        let start = values(outputs * inputs, 3);
        let mut expected = start.clone();
        for (o, sums) in expected.chunks_exact_mut(inputs).enumerate() {
            for (i, sum) in sums.iter_mut().enumerate() {
                for row in 0..rows {
                    *sum = a[row * (outputs + 3) + 2 + o].mul_add(b[row * inputs + i], *sum);
                }
            }
        }
        for isa in Isa::available() {
            let (mut together, mut cut) = (start.clone(), start.clone());
            let mut room = Room::default();
            let a = ColumnsOf::all(&a, outputs + 3).part(2, outputs);
            let b = ColumnsOf::all(&b, inputs);
            add_products_of_columns(isa, &mut room, 0..rows, a, b, &mut together);
            assert_eq!(bits(&together), bits(&expected), "{rows} rows on {isa:?}");
            for part in [0..rows / 3, rows / 3..rows] {
                add_products_of_columns(isa, &mut room, part, a, b, &mut cut);
            }
            assert_eq!(bits(&cut), bits(&expected), "{rows} rows, cut, on {isa:?}");
        }
    }
}

#[test]
fn a_transposed_matrix_multiplies_by_its_transpose_and_adds() {
    for (outputs, inputs, rows) in [(5, 3, 1), (33, 70, 13), (400, 40, 100)] {
        let w = values(outputs * inputs, 4);
        let x = values(rows * outputs, 5);
        let start = values(rows * inputs, 6);
        for isa in Isa::available() {
            for halves in [false, true] {
                let half_bits = bf16_bits(&w);
                let used: Vec<f32> = match halves {
                    true => half_bits.iter().map(|&bits| wide(bits)).collect(),
                    false => w.clone(),
                };
                let pairs = bytes(&half_bits);
                let element = if halves {
                    Element::Bf16(&pairs)
                } else {
                    Element::F32(&w)
                };
                let matrix = Matrix::pack_transposed(element, outputs, inputs, &Threads::ONE);
                let mut y = start.clone();
                matrix.add_product(isa, &x, &mut y);
                for (row, y) in y.chunks_exact(inputs).enumerate() {
                    for (i, y) in y.iter().enumerate() {
                        let terms = (0..outputs).map(|o| (x[row * outputs + o], used[o * inputs + i]));
                        let expected = terms.fold(start[row * inputs + i], |sum, (x, w)| x.mul_add(w, sum));
                        assert_eq!(y.to_bits(), expected.to_bits(), "{outputs} × {inputs} on {isa:?}");
                    }
                }
            }
        }
    }
}
