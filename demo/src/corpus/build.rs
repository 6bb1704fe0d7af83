//! `springtide corpus build`: turns files into a tokenizer and packed windows for
//! `springtide train sft`.
//!
//! Files are concatenated. In about a quarter of the lines the text is cut at a pause:
//! `prefix <|cut|> rest <|eol|>`. Prefix and rest are tokenized apart, as they are in a request.
//! Declining is taught as a label only: at some positions of the rest the *target* becomes
//! `<|decline|>` while the input continues as typed. The model can therefore decline at any token
//! and never reads a decline.

use super::sources::{SourceFile, Split, files_of};
use super::{pauses, tokenizer};
use crate::{house_style, users::share};
use anyhow::Context;
use bytes::Bytes;
use rand::{Rng, SeedableRng, rngs::StdRng, seq::SliceRandom};
use safetensors::{Dtype, tensor::TensorView};
use std::path::{Path, PathBuf};
use tokenizers::Tokenizer;

#[derive(Debug, clap::Args)]
pub struct Args {
    /// Folder for the tokenizer, the windows and the dataset card.
    #[arg(long, default_value = ".springtide/base")]
    pub out: PathBuf,
    #[arg(long, default_value_t = 2048)]
    pub vocab_size: usize,
    /// Tokens of one window.
    #[arg(long, default_value_t = 256)]
    pub context: usize,
    /// Use the tokenizer of this folder instead of training one.
    #[arg(long)]
    pub tokenizer: Option<PathBuf>,
    /// Share of the places in training files at which a convention of the demo's house users is followed.
    #[arg(long, default_value_t = 0.0, value_parser = share)]
    pub house: f64,
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
}

/// Fraction of lines with a pause: about five in a window of 256 tokens.
const CUT_SHARE: f64 = 0.25;
/// Fraction of targets that become a decline, at the first token of a rest and at each later one.
const DECLINE_FIRST: f64 = 0.15;
const DECLINE_LATER: f64 = 0.04;
/// Weight of the rest of a line in the loss. Other text weighs 1.
const REST_WEIGHT: f32 = 2.0;
/// Bytes of text that the tokenizer is trained on.
const TOKENIZER_BYTES: usize = 12_000_000;

/// One position of the stream.
#[derive(Clone, Copy)]
struct Slot {
    token: u32,
    /// What the position before should predict, and the weight of that in the loss.
    target: u32,
    weight: f32,
}

pub fn run(args: &Args) -> anyhow::Result<()> {
    std::fs::create_dir_all(&args.out).with_context(|| format!("create {}", args.out.display()))?;
    let mut rng = StdRng::seed_from_u64(args.seed);
    let mut train = files_of(Split::Train)?;
    train.shuffle(&mut rng);
    if args.house > 0.0 {
        for file in &mut train {
            file.text = house_style::sprinkle(&file.text, args.house, &mut rng);
        }
    }
    let tokenizer = match &args.tokenizer {
        Some(dir) => Tokenizer::from_file(dir.join("tokenizer.json"))
            .map_err(|e| anyhow::anyhow!("read the tokenizer of {}: {e}", dir.display()))?,
        None => {
            let mut bytes = 0;
            let sample = train.iter().map(|f| f.text.as_str()).take_while(|t| {
                bytes += t.len();
                bytes < TOKENIZER_BYTES
            });
            tokenizer::train(sample, args.vocab_size)?
        }
    };
    tokenizer
        .save(args.out.join("tokenizer.json"), true)
        .map_err(|e| anyhow::anyhow!("write tokenizer.json: {e}"))?;
    for (name, text) in tokenizer::side_files(&tokenizer, args.context)? {
        std::fs::write(args.out.join(name), text).with_context(|| format!("write {name}"))?;
    }
    let held_out = files_of(Split::HeldOut)?;
    let mut card = String::from(CARD_HEAD);
    for (split, files) in [("train", &train), ("held_out", &held_out)] {
        let windows = pack(&tokenizer, files, args.context, &mut rng)?;
        println!(
            "{split}: {} files, {} windows of {} tokens",
            files.len(),
            windows.len(),
            args.context
        );
        write_windows(&args.out.join(format!("{split}.safetensors")), &windows, args.context)?;
        describe(&mut card, split, files, Some(windows.len()));
    }
    describe(&mut card, "demo", &files_of(Split::Demo)?, None);
    std::fs::write(args.out.join("crates.txt"), card).context("write crates.txt")?;
    Ok(())
}

/// Packs files into shuffled windows of `context + 1` slots. The remainder is left out.
fn pack(
    tokenizer: &Tokenizer,
    files: &[SourceFile],
    context: usize,
    rng: &mut StdRng,
) -> anyhow::Result<Vec<Vec<Slot>>> {
    let ids = Specials {
        cut: tokenizer::id(tokenizer, tokenizer::CUT)?,
        eol: tokenizer::id(tokenizer, tokenizer::EOL)?,
        decline: tokenizer::id(tokenizer, tokenizer::DECLINE)?,
        end: tokenizer::id(tokenizer, tokenizer::END)?,
    };
    let mut stream = Vec::new();
    for file in files {
        push_file(&mut stream, tokenizer, &file.text, &ids, rng)?;
    }
    let mut windows: Vec<Vec<Slot>> = stream
        .windows(context + 1)
        .step_by(context)
        .map(<[Slot]>::to_vec)
        .collect();
    windows.shuffle(rng);
    Ok(windows)
}

struct Specials {
    cut: u32,
    eol: u32,
    decline: u32,
    end: u32,
}

fn push_file(
    stream: &mut Vec<Slot>,
    tokenizer: &Tokenizer,
    text: &str,
    ids: &Specials,
    rng: &mut StdRng,
) -> anyhow::Result<()> {
    let plain = |token: u32| Slot {
        token,
        target: token,
        weight: 1.0,
    };
    let mut from = 0;
    for line in pauses::lines(text) {
        if !rng.random_bool(CUT_SHARE) {
            continue;
        }
        let Some(pause) = pauses::on_line(text, line, rng) else {
            continue;
        };
        stream.extend(
            tokenizer::encode(tokenizer, &text[from..pause.at])?
                .into_iter()
                .map(plain),
        );
        // The developer decides where the cut is, so there is nothing to predict.
        stream.push(Slot {
            token: ids.cut,
            target: ids.cut,
            weight: 0.0,
        });
        let rest = tokenizer::encode(tokenizer, &text[pause.at..pause.end])?;
        for (i, token) in rest.into_iter().chain([ids.eol]).enumerate() {
            let share = if i == 0 { DECLINE_FIRST } else { DECLINE_LATER };
            let target = if rng.random_bool(share) { ids.decline } else { token };
            stream.push(Slot {
                token,
                target,
                weight: REST_WEIGHT,
            });
        }
        from = pause.end;
    }
    stream.extend(tokenizer::encode(tokenizer, &text[from..])?.into_iter().map(plain));
    stream.push(plain(ids.end));
    Ok(())
}

/// `input_ids` and `labels` `[N, context]` u16, `weights` `[N, context]` f32: position t reads
/// `input_ids[t]` and should predict `labels[t]`.
fn write_windows(path: &Path, windows: &[Vec<Slot>], context: usize) -> anyhow::Result<()> {
    let pick = |f: &dyn Fn(&[Slot]) -> Vec<u8>| -> Bytes {
        Bytes::from(windows.iter().flat_map(|w| f(w)).collect::<Vec<u8>>())
    };
    let u16s =
        |ids: &mut dyn Iterator<Item = u32>| -> Vec<u8> { ids.flat_map(|id| (id as u16).to_le_bytes()).collect() };
    let input = pick(&|w| u16s(&mut w[..context].iter().map(|s| s.token)));
    let labels = pick(&|w| u16s(&mut w[1..].iter().map(|s| s.target)));
    let weights = pick(&|w| w[1..].iter().flat_map(|s| s.weight.to_le_bytes()).collect());
    let shape = vec![windows.len(), context];
    let views = [
        ("input_ids", TensorView::new(Dtype::U16, shape.clone(), &input)?),
        ("labels", TensorView::new(Dtype::U16, shape.clone(), &labels)?),
        ("weights", TensorView::new(Dtype::F32, shape, &weights)?),
    ];
    safetensors::serialize_to_file(views, None, path).with_context(|| format!("write {}", path.display()))?;
    Ok(())
}

const CARD_HEAD: &str = "# Dataset card

Rust sources of the crates that the build of this project fetches, under the license that each
crate's Cargo.toml names. All crates of a family (the name up to its first `-` or `_`) are in the
same split. Identical files are taken once. Generated files, tables and files outside 0.4–120 kB are
excluded. At most 600 kB of one crate are taken.
";

fn describe(card: &mut String, split: &str, files: &[SourceFile], windows: Option<usize>) {
    let bytes: usize = files.iter().map(|f| f.text.len()).sum();
    let mut crates: Vec<&str> = files.iter().map(|f| f.krate.as_str()).collect();
    crates.sort_unstable();
    crates.dedup();
    let packed = windows.map_or(String::new(), |n| format!(", {n} windows"));
    card.push_str(&format!(
        "\n## {split}: {} crates, {} files, {:.1} MB{packed}\n\n{}\n",
        crates.len(),
        files.len(),
        bytes as f64 / 1e6,
        crates.join(", ")
    ));
}
