//! Azure's trace, as the arrivals of one run.

use std::fs;
use std::time::Duration;

use anyhow::{Context, ensure};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use time::PrimitiveDateTime;
use time::macros::format_description;

use crate::Args;

/// A request of production.
#[derive(Debug, Clone, Copy)]
pub struct Arrival {
    /// Since the run began.
    pub at: Duration,
    pub prompt_tokens: usize,
    pub max_tokens: usize,
}

pub fn read(args: &Args) -> anyhow::Result<Vec<Arrival>> {
    let text = fs::read_to_string(&args.trace).with_context(|| format!("read {}", args.trace.display()))?;
    let lines = text.lines().skip(1).filter(|line| !line.is_empty());
    let rows: Vec<(PrimitiveDateTime, usize, usize)> = lines.map(row).collect::<anyhow::Result<_>>()?;
    let (first, last) = rows.first().zip(rows.last()).context("the trace is empty")?;
    let (begin, length) = (first.0, (last.0 - first.0).as_seconds_f64());
    ensure!(length > 0.0, "all requests of the trace arrive at once");
    let mut random = StdRng::seed_from_u64(args.seed);
    let share = (args.requests as f64 / rows.len() as f64).min(1.0);
    let tokens = |count: usize| (count / args.shorter.max(1)).clamp(1, args.tokens_max);
    let mut arrivals = Vec::new();
    for (at, prompt, answer) in rows {
        let x = (at - begin).as_seconds_f64() / length;
        let kept = share * (args.low + (1.0 - args.low) * (std::f64::consts::PI * x).sin().powi(2));
        if random.random_bool(kept.clamp(0.0, 1.0)) {
            arrivals.push(Arrival {
                at: Duration::from_secs_f64(x * args.seconds as f64),
                prompt_tokens: tokens(prompt),
                max_tokens: tokens(answer),
            });
        }
    }
    ensure!(!arrivals.is_empty(), "no request is left; give more --requests");
    Ok(arrivals)
}

fn row(line: &str) -> anyhow::Result<(PrimitiveDateTime, usize, usize)> {
    let format = format_description!("[year]-[month]-[day] [hour]:[minute]:[second].[subsecond]");
    let mut fields = line.split(',');
    let mut field = || {
        fields
            .next()
            .with_context(|| format!("a line with too few fields: {line}"))
    };
    let at = PrimitiveDateTime::parse(field()?, format).context("a time")?;
    let mut count = || -> anyhow::Result<usize> { Ok(field()?.trim().parse()?) };
    Ok((at, count()?, count()?))
}
