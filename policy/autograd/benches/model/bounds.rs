//! The limits of this machine, measured by loops that do nothing else.

use artifact::isa::Isa;
use artifact::threads::Threads;
use model::kernel::{Compute, Element, Matrix};
use std::hint::black_box;
use std::time::Instant;

pub struct Limits {
    /// Read from memory outside the caches, by all threads together.
    pub bytes_per_second: f64,
    /// Floating-point operations per second. A multiply-add counts as two.
    pub flops: f64,
}

pub fn measure(compute: Compute, threads: usize) -> Limits {
    let values: Vec<u64> = (0..32 << 20).collect();
    Limits {
        bytes_per_second: best(threads, || reading(&values)),
        flops: best(threads, || multiplying(compute)),
    }
}

/// The best of five rounds. Each is the sum over threads that run at the same time.
fn best(threads: usize, work: impl Fn() -> f64 + Sync) -> f64 {
    let round = || {
        std::thread::scope(|scope| {
            let all: Vec<_> = (0..threads).map(|_| scope.spawn(&work)).collect();
            all.into_iter().filter_map(|thread| thread.join().ok()).sum()
        })
    };
    (0..5).map(|_| round()).fold(0.0, f64::max)
}

fn reading(values: &[u64]) -> f64 {
    let started = Instant::now();
    let mut sums = [0u64; 8];
    for chunk in black_box(values).chunks_exact(8) {
        for (sum, value) in sums.iter_mut().zip(chunk) {
            *sum = sum.wrapping_add(*value);
        }
    }
    black_box(sums);
    (values.len() * 8) as f64 / started.elapsed().as_secs_f64()
}

/// A product whose operands stay in the L1 cache. It comes close to the speed of the arithmetic
/// units.
fn multiplying(compute: Compute) -> f64 {
    let (rows, inputs, outputs) = (12, 128, 32);
    let matrix = Matrix::pack(
        Element::F32(&vec![0.5; inputs * outputs]),
        outputs,
        inputs,
        compute,
        &Threads::ONE,
    );
    let x = vec![0.25; rows * inputs];
    let mut y = vec![0.0; rows * outputs];
    let times = 20_000;
    let started = Instant::now();
    for _ in 0..times {
        matrix.multiply(Isa::best(), &Threads::ONE, black_box(&x), None, &mut y);
    }
    black_box(&y);
    (2 * rows * inputs * outputs * times) as f64 / started.elapsed().as_secs_f64()
}
