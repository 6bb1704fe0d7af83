//! Tokens per second of the exact model and of plain libtorch, on the same weights in one process:
//! prefill, decode by batch size, and a training step. In f32, bf16, and f32 on two threads. Run by
//! `make bench NAME=policy`.
//!
//! Rounds of both alternate. Each figure is a median of rounds, and each ratio the median of the
//! rounds' ratios, so that a slow phase of the machine affects both. Each row names its bound: the
//! weight bytes that a decode must read, or the multiply-adds, at the limits that [`bounds`]
//! measures.

mod bounds;
mod cases;
mod libtorch;

use artifact::checkpoint::Checkpoint;
use artifact::isa::Isa;
use model::config::ModelConfig;
use model::exact::Compute;
use model::random_checkpoint;
use std::path::Path;

const ROUNDS: usize = 5;

/// The precision and threads of both.
#[derive(Clone, Copy)]
struct Setting {
    name: &'static str,
    compute: Compute,
    threads: usize,
}

const SETTINGS: [Setting; 3] = [
    Setting {
        name: "f32",
        compute: Compute::F32,
        threads: 1,
    },
    Setting {
        name: "bf16",
        compute: Compute::Bf16,
        threads: 1,
    },
    Setting {
        name: "f32, two threads",
        compute: Compute::F32,
        threads: 2,
    },
];

struct Row {
    model: &'static str,
    folder: &'static str,
    setting: Setting,
    what: String,
    /// Decode steps of one call; 0 for other rows.
    steps: usize,
    ours: f64,
    libtorch: f64,
    ratio: f64,
    bound: f64,
    bound_by: &'static str,
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let asked = |option: &str| std::env::args().any(|arg| arg == option);
    let rounds = if asked("--quick") { 1 } else { ROUNDS };
    let demo = Checkpoint::read_dir(&root.join("demo/models/base"))?;
    let big = random_checkpoint(&llama_100m(), 1);
    let out = root.join("target/bench");
    // tools/bench_transformers.py measures the same weights.
    big.write_dir(&out.join("llama-100m"))?;
    let mut rows = Vec::new();
    let mut machine = Vec::new();
    for setting in SETTINGS {
        let limits = bounds::measure(setting.compute, setting.threads);
        println!(
            "{:?}, {}: this machine reads {:.1} GB/s and computes {:.0} Gflop/s of multiply-adds",
            Isa::best(),
            setting.name,
            limits.bytes_per_second / 1e9,
            limits.flops / 1e9
        );
        machine.push(serde_json::json!({
            "products": setting.name, "bytes_per_second": limits.bytes_per_second, "flops": limits.flops,
        }));
        for (model, folder, checkpoint, context) in [
            ("demo, 5 M", "demo/models/base", &demo, 256),
            ("Llama, 100 M", "target/bench/llama-100m", &big, 512),
        ] {
            let case = cases::Case {
                model,
                folder,
                setting,
                limits: &limits,
                rounds,
                training_only: asked("--training"),
            };
            rows.extend(case.run(checkpoint, context)?);
        }
    }
    println!(
        "\n| model | products | what | exact, tokens/s | libtorch, tokens/s | exact ÷ libtorch | of the bound | bound by |"
    );
    println!("|---|---|---|---|---|---|---|---|");
    for row in &rows {
        println!(
            "| {} | {} | {} | {:.0} | {:.0} | **{:.2}** | {:.0}% | {} |",
            row.model,
            row.setting.name,
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
                "model": row.model, "folder": row.folder, "products": row.setting.name, "what": row.what,
                "steps": row.steps, "exact_tokens_per_second": row.ours, "libtorch_tokens_per_second": row.libtorch,
                "ratio": row.ratio, "bound_tokens_per_second": row.bound, "bound_by": row.bound_by,
            })
        })
        .collect();
    let report = serde_json::json!({
        "isa": format!("{:?}", Isa::best()), "rounds": rounds, "machine": machine, "rows": json,
    });
    std::fs::write(out.join("policy.json"), format!("{report:#}\n"))?;
    Ok(())
}

/// 12 layers of width 768 and a tied vocabulary of 32,000: 100 M weights.
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
