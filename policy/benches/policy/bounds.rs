//! What this machine gives at most, measured by loops that do nothing else.

use policy::kernel::{Element, Isa, Matrix};
use std::hint::black_box;
use std::time::Instant;

pub struct Limits {
    /// One thread reading memory that no cache holds.
    pub bytes_per_second: f64,
    /// Multiply-adds count as two.
    pub flops: f64,
}

pub fn measure() -> Limits {
    Limits {
        bytes_per_second: reading(),
        flops: multiplying(),
    }
}

fn best(rounds: usize, mut work: impl FnMut() -> f64) -> f64 {
    (0..rounds).map(|_| work()).fold(0.0, f64::max)
}

fn reading() -> f64 {
    let values: Vec<u64> = (0..32 << 20).collect();
    best(5, || {
        let started = Instant::now();
        let mut sums = [0u64; 8];
        for chunk in black_box(&values).chunks_exact(8) {
            for (sum, value) in sums.iter_mut().zip(chunk) {
                *sum = sum.wrapping_add(*value);
            }
        }
        black_box(sums);
        (values.len() * 8) as f64 / started.elapsed().as_secs_f64()
    })
}

/// A product whose every operand stays in the first cache: as near to the units' own speed as a chain of adds comes.
fn multiplying() -> f64 {
    let (rows, inputs, outputs) = (12, 128, 32);
    let matrix = Matrix::pack(&Element::F32(vec![0.5; inputs * outputs]), outputs, inputs);
    let x = vec![0.25; rows * inputs];
    let mut y = vec![0.0; rows * outputs];
    let times = 20_000;
    best(5, || {
        let started = Instant::now();
        for _ in 0..times {
            matrix.multiply(Isa::best(), black_box(&x), None, &mut y);
        }
        black_box(&y);
        (2 * rows * inputs * outputs * times) as f64 / started.elapsed().as_secs_f64()
    })
}
