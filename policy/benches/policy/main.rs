//! Tokens a second of the exact model, beside plain libtorch f32 in the same process on the same weights, one after the
//! other in turn: prefill, decode by batch size, and a training step. `make bench-policy`.
//!
//! Each figure is the median of its rounds; the ratio is the median of the rounds' ratios, so that what slows the machine
//! for a while slows both. Beside each stands what bounds it: the bytes of weights that a decode must read, or the
//! multiply-adds of a prefill, at what this machine's memory and units give in a loop that does nothing else.

mod bounds;
mod libtorch;

use libtorch::Plain;
use policy::config::ModelConfig;
use policy::image::Image;
use policy::kernel::Isa;
use policy::model::{KvCache, Model};
use policy::network::{self, Network, random_image, require_grad};
use std::path::Path;
use std::time::Instant;
use tch::{Kind, Tensor};

const ROUNDS: usize = 7;

struct Row {
    model: &'static str,
    folder: &'static str,
    what: String,
    ours: f64,
    libtorch: f64,
    ratio: f64,
    bound: f64,
    bound_by: &'static str,
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    network::set_threads(1);
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let limits = bounds::measure();
    println!(
        "{:?}, one thread; this machine gives {:.1} GB/s to one reader and {:.0} Gflop/s of f32 multiply-adds\n",
        Isa::best(),
        limits.bytes_per_second / 1e9,
        limits.flops / 1e9
    );
    let demo = Image::read_dir(&root.join("models/demo-base"))?;
    let big = random_image(&llama_100m(), 1);
    let out = root.join("target/bench");
    // for whoever measures another engine on the same weights
    big.write_dir(&out.join("llama-100m"))?;
    let mut rows = Vec::new();
    for (name, folder, image, context) in [
        ("demo, 5 M", "models/demo-base", &demo, 256),
        ("Llama, 100 M", "target/bench/llama-100m", &big, 512),
    ] {
        let quick = std::env::args().any(|arg| arg == "--quick");
        rows.extend(bench(
            name,
            folder,
            image,
            context,
            &limits,
            if quick { 1 } else { ROUNDS },
        )?);
    }
    println!(
        "| model | what | exact, tokens/s | libtorch f32, tokens/s | exact ÷ libtorch | of the bound | bound by |"
    );
    println!("|---|---|---|---|---|---|---|");
    for row in &rows {
        println!(
            "| {} | {} | {:.0} | {:.0} | **{:.2}** | {:.0}% | {} |",
            row.model,
            row.what,
            row.ours,
            row.libtorch,
            row.ratio,
            100.0 * row.ours / row.bound,
            row.bound_by
        );
    }
    let json: Vec<_> = rows
        .iter()
        .map(|row| {
            serde_json::json!({
                "model": row.model, "folder": row.folder, "what": row.what, "exact_tokens_per_second": row.ours,
                "libtorch_tokens_per_second": row.libtorch, "ratio": row.ratio,
                "bound_tokens_per_second": row.bound, "bound_by": row.bound_by,
            })
        })
        .collect();
    let report = serde_json::json!({
        "isa": format!("{:?}", Isa::best()), "threads": 1, "rounds": ROUNDS,
        "bytes_per_second": limits.bytes_per_second, "flops": limits.flops, "rows": json,
    });
    std::fs::write(out.join("policy.json"), format!("{report:#}\n"))?;
    Ok(())
}

/// 12 layers of width 768, a vocabulary of 32,000, tied: 100 M weights.
fn llama_100m() -> ModelConfig {
    ModelConfig {
        vocab_size: 32_000,
        hidden_size: 768,
        intermediate_size: 2048,
        num_hidden_layers: 12,
        num_attention_heads: 12,
        num_key_value_heads: 4,
        head_dim: 64,
        rms_norm_eps: 1e-5,
        max_position_embeddings: 1024,
        tie_word_embeddings: true,
        ..ModelConfig::default()
    }
}

fn bench(
    name: &'static str,
    folder: &'static str,
    image: &Image,
    context: usize,
    limits: &bounds::Limits,
    rounds: usize,
) -> Result<Vec<Row>, Box<dyn std::error::Error>> {
    let model = Model::from_image(image)?;
    let config = model.config().clone();
    let network = Network::from_image(image)?;
    let slots = 64;
    let mut cache = KvCache::new(&model, slots, context);
    let mut plain = Plain::new(&config, network.parameters(), slots as i64, context as i64);
    let ids: Vec<u32> = (0..context as u32)
        .map(|i| i * 7919 % config.vocab_size as u32)
        .collect();
    let half = context / 2;
    let weights: i64 = config
        .parameter_shapes()
        .iter()
        .map(|(_, shape)| shape.iter().product::<i64>())
        .sum();
    let embedding = config.vocab_size * config.hidden_size;
    let body = (weights - embedding) as f64;
    let mut rows = Vec::new();

    let logits = f64::from(config.vocab_size as i32) * config.hidden_size as f64;
    let (ours, theirs, ratio) = in_turn(
        rounds,
        || {
            cache.clear(0);
            model.prefill(&mut cache, 0, &ids[..half]).map(|_| half)
        },
        || {
            let _no_grad = tch::no_grad_guard();
            let _ = plain.prefill(0, &ids[..half]);
            half
        },
    )?;
    rows.push(Row {
        model: name,
        folder,
        what: format!("prefill of {half}"),
        ours,
        libtorch: theirs,
        ratio,
        bound: limits.flops / (2.0 * (body + logits / half as f64)),
        bound_by: "multiply-adds",
    });

    for batch in [1usize, 4, 16, 64] {
        for slot in 0..batch {
            cache.clear(slot);
            model.prefill(&mut cache, slot, &ids[..half])?;
            let _no_grad = tch::no_grad_guard();
            let _ = plain.prefill(slot as i64, &ids[..half]);
        }
        let tokens = vec![11u32; batch];
        let steps = (context - half).min(if batch == 1 { 64 } else { 16 });
        let (ours, theirs, ratio) = in_turn(
            rounds,
            || {
                for slot in 0..batch {
                    cache.truncate(slot, half);
                }
                for _ in 0..steps {
                    model.decode(&mut cache, &tokens)?;
                }
                Ok(steps * batch)
            },
            || {
                let _no_grad = tch::no_grad_guard();
                for step in 0..steps {
                    let _ = plain.decode(&tokens, (half + step) as i64);
                }
                steps * batch
            },
        )?;
        // each step reads every weight once, two bytes each, or multiplies each of them once per row
        let read = limits.bytes_per_second / (2.0 * (body + logits)) * batch as f64;
        let multiply = limits.flops / (2.0 * (body + logits));
        rows.push(Row {
            model: name,
            folder,
            what: format!("decode, batch {batch}"),
            ours,
            libtorch: theirs,
            ratio,
            bound: read.min(multiply),
            bound_by: if read < multiply {
                "bytes of weights"
            } else {
                "multiply-adds"
            },
        });
    }

    let leaves = require_grad(network.parameters());
    let plain = Plain::new(&config, &leaves, 1, context as i64);
    let learning = Network::from_parameters(config.clone(), require_grad(network.parameters()))?;
    let count = 8.min(2048 / half);
    let sequences: Vec<&[u32]> = vec![&ids[..half]; count];
    let asked: Vec<usize> = (0..count * half).filter(|row| row % half >= half - 16).collect();
    let wide: Vec<i64> = ids[..half].iter().map(|&id| i64::from(id)).collect();
    let wide = Tensor::from_slice(&wide).unsqueeze(0).repeat([count as i64, 1]);
    let picked: Vec<i64> = asked.iter().map(|&row| row as i64).collect();
    let picked = Tensor::from_slice(&picked);
    let loss = |logits: &Tensor| {
        logits
            .log_softmax(-1, Kind::Float)
            .select(-1, 3)
            .sum(Kind::Float)
            .backward();
    };
    let (ours, theirs, ratio) = in_turn(
        rounds.min(3),
        || {
            let pass = model.score(&sequences, &asked, None)?;
            let hidden = network::leaf(&pass.hidden);
            loss(&network::with_values(
                learning.project(&hidden),
                &network::tensor(&pass.logits),
            ));
            learning.backward(&pass, hidden.grad());
            Ok(count * half)
        },
        || {
            loss(&plain.logits(&wide).flatten(0, 1).index_select(0, &picked));
            count * half
        },
    )?;
    rows.push(Row {
        model: name,
        folder,
        what: format!("training step, {count} × {half}, 16 trained each"),
        ours,
        libtorch: theirs,
        ratio,
        // forward, forward again, and twice as much back
        bound: limits.flops / (2.0 * 4.0 * body),
        bound_by: "multiply-adds",
    });
    Ok(rows)
}

/// Tokens a second of both, and the ratio, over rounds of at least a tenth of a second each in turn, after one that warms up.
fn in_turn(
    rounds: usize,
    mut ours: impl FnMut() -> Result<usize, policy::model::Error>,
    mut theirs: impl FnMut() -> usize,
) -> Result<(f64, f64, f64), policy::model::Error> {
    ours()?;
    theirs();
    let (mut a, mut b, mut ratios) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..rounds {
        let rate = |work: &mut dyn FnMut() -> Result<usize, policy::model::Error>| {
            let started = Instant::now();
            let mut tokens = 0;
            while started.elapsed().as_secs_f64() < 0.3 {
                tokens += work()?;
            }
            Ok::<f64, policy::model::Error>(tokens as f64 / started.elapsed().as_secs_f64())
        };
        let x = rate(&mut ours)?;
        let y = rate(&mut || Ok(theirs()))?;
        a.push(x);
        b.push(y);
        ratios.push(x / y);
    }
    Ok((median(a), median(b), median(ratios)))
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}
