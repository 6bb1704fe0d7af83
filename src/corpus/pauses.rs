//! Pauses: places where a developer stops typing and the rest of the line is asked for.

use super::{sources, tokenizer};
use rand::{Rng, SeedableRng, rngs::StdRng};
use std::ops::Range;

/// A place in a text, in bytes: the file up to `at` has been typed, `at..end` is what will be typed next on this line
/// (trailing blanks left out; never empty).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Pause {
    pub at: usize,
    pub end: usize,
}

/// Where one can pause on `line` of `text` (a byte range without its newline): every character from the end of the
/// indentation, since editors indent by themselves, to the last one that is not blank. Empty on a blank line.
pub fn columns(text: &str, line: Range<usize>) -> Vec<usize> {
    let typed = text[line.clone()].trim_end();
    let indentation = typed.len() - typed.trim_start().len();
    let from = line.start + indentation;
    typed[indentation..].char_indices().map(|(at, _)| from + at).collect()
}

/// A pause at a uniformly random column of a line; `None` on a blank one.
pub fn on_line(text: &str, line: Range<usize>, rng: &mut impl Rng) -> Option<Pause> {
    let columns = columns(text, line.clone());
    let end = line.start + text[line].trim_end().len();
    (!columns.is_empty()).then(|| Pause {
        at: columns[rng.random_range(0..columns.len())],
        end,
    })
}

/// Byte ranges of a text's lines, without their newlines.
pub fn lines(text: &str) -> Vec<Range<usize>> {
    let mut at = 0;
    text.split('\n')
        .map(|line| {
            let range = at..at + line.len();
            at += line.len() + 1;
            range
        })
        .collect()
}

/// The end of the file so far, which is what a prompt shows of it: at most the last `chars` characters before byte `at`, from
/// the start of a line unless the cursor's own line is longer than that.
pub fn tail(text: &str, at: usize, chars: usize) -> &str {
    let before = &text[..at];
    let nth_last = before.char_indices().rev().nth(chars.saturating_sub(1));
    let Some((first, _)) = nth_last.filter(|(at, _)| *at > 0) else {
        return before;
    };
    if before.as_bytes()[first - 1] == b'\n' {
        return &before[first..];
    }
    match before[first..].find('\n') {
        Some(line_end) => &before[first + line_end + 1..],
        None => &before[first..],
    }
}

/// `springtide corpus evaluate`: how often a model's greedy suggestion is exactly what was typed.
#[derive(Debug, clap::Args)]
pub struct EvaluateArgs {
    /// Hugging Face folder of the model.
    #[arg(long, default_value = "models/demo-base")]
    pub model: std::path::PathBuf,
    /// How many pauses, drawn from the held-out crates.
    #[arg(long, default_value_t = 2000)]
    pub pauses: usize,
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
}

/// Prints exact match of greedy suggestions on held-out crates, with and without the freedom to decline.
#[cfg(feature = "torch")]
pub fn evaluate(args: &EvaluateArgs) -> anyhow::Result<()> {
    use policy::model::{KvCache, Model};
    let image = policy::image::Image::read_dir(&args.model)?;
    let model = Model::from_image(&image)?;
    let tokens = policy::tokenizer::Tokenizer::from_image(&image)?;
    let files = sources::files_of(sources::Split::HeldOut)?;
    anyhow::ensure!(!files.is_empty(), "there are no held-out files; run `cargo fetch`");
    let mut rng = StdRng::seed_from_u64(args.seed);
    let mut cache = KvCache::new(&model, 1, model.config().max_position_embeddings as usize);
    let decline = tokens.decline_id();
    let (mut matched, mut shown, mut matched_shown, mut asked) = (0u32, 0u32, 0u32, 0u32);
    while (asked as usize) < args.pauses {
        let file = &files[rng.random_range(0..files.len())];
        let spans = lines(&file.text);
        let line = spans[rng.random_range(0..spans.len())].clone();
        let Some(pause) = on_line(&file.text, line, &mut rng) else {
            continue;
        };
        asked += 1;
        let prefix = tail(&file.text, pause.at, CONTEXT_CHARS);
        let mut ids = tokens.encode(&format!("{prefix}{}", tokenizer::CUT))?;
        let room = cache.context() - SUGGESTION_TOKENS_MAX;
        if ids.len() > room {
            ids.drain(..ids.len() - room);
        }
        let mut logits = model.prefill(&mut cache, 0, &ids)?;
        let mut suggestion = Vec::new();
        let mut would_decline = false;
        for _ in 0..SUGGESTION_TOKENS_MAX {
            let best = |skip: Option<u32>| {
                (0..logits.len() as u32)
                    .filter(|id| Some(*id) != skip)
                    .max_by(|a, b| logits[*a as usize].total_cmp(&logits[*b as usize]))
                    .unwrap_or(0)
            };
            would_decline |= Some(best(None)) == decline;
            let token = best(decline);
            if tokens.stop_ids().contains(&token) {
                break;
            }
            suggestion.push(token);
            logits = model.decode(&mut cache, &[token])?.swap_remove(0);
        }
        cache.clear(0);
        let right = tokens.decode(&suggestion)?.trim_end() == &file.text[pause.at..pause.end];
        matched += u32::from(right);
        shown += u32::from(!would_decline);
        matched_shown += u32::from(right && !would_decline);
    }
    let share = |n: u32, of: u32| f64::from(n) / f64::from(of.max(1));
    println!(
        "pauses {asked}  greedy exact match {:.3}  shown {:.3}  of shown right {:.3}",
        share(matched, asked),
        share(shown, asked),
        share(matched_shown, shown)
    );
    Ok(())
}

/// What the evaluation shows of a file, in characters; what does not fit the context is cut on the left.
const CONTEXT_CHARS: usize = 640;
/// A suggestion is at most this long, in tokens.
pub const SUGGESTION_TOKENS_MAX: usize = 16;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pause_leaves_something_to_type_and_never_sits_in_the_indentation() {
        let text = "fn main() {\n    let x = 1;   \n\n}\n";
        let mut rng = StdRng::seed_from_u64(1);
        for range in lines(text) {
            for _ in 0..50 {
                match on_line(text, range.clone(), &mut rng) {
                    Some(pause) => {
                        let rest = &text[pause.at..pause.end];
                        assert!(!rest.is_empty() && rest.trim_end() == rest);
                        assert!(!text[range.start..pause.at].is_empty() || !rest.starts_with(' '));
                    }
                    None => assert!(text[range.clone()].trim().is_empty()),
                }
            }
        }
    }

    #[test]
    fn the_tail_starts_on_a_line() {
        let text = "one\ntwo\nthree\nfour";
        assert_eq!(tail(text, 17, 9), "three\nfou");
        assert_eq!(tail(text, 17, 100), "one\ntwo\nthree\nfou");
        assert_eq!(tail("äöü\nxyz", 9, 4), "xy");
        assert_eq!(tail("äöüxyz", 9, 4), "üxyz");
    }
}
