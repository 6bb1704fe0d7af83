//! All ways in which samplers and trainers compute a token.

use model::exact::{ExactModel, KvCache};

/// A name, and a function from the model and the sequences to the logits of every position from
/// `FROM` on, one sequence after the other.
pub type Way = (&'static str, fn(&ExactModel, &[Vec<u32>]) -> Vec<f32>);

/// The first position that is compared. Earlier ones are the prompt.
const FROM: usize = 6;

pub const WAYS: [Way; 8] = [
    ("trainer, packed", |model, sequences| {
        let refs: Vec<&[u32]> = sequences.iter().map(Vec::as_slice).collect();
        let mut rows = Vec::new();
        let mut first = 0;
        for ids in sequences {
            rows.extend(first + FROM - 1..first + ids.len());
            first += ids.len();
        }
        model.score(&refs, &rows, None).unwrap().logits.values().to_vec()
    }),
    ("trainer, alone", |model, sequences| {
        let one = |ids: &Vec<u32>| {
            let rows: Vec<usize> = (FROM - 1..ids.len()).collect();
            model.score(&[ids], &rows, None).unwrap().logits.values().to_vec()
        };
        sequences.iter().flat_map(one).collect()
    }),
    ("prefill", |model, sequences| {
        let mut cache = KvCache::new(model, 1, 64);
        let mut all = Vec::new();
        for ids in sequences {
            for end in FROM..=ids.len() {
                cache.clear(0);
                all.extend(model.prefill(&mut cache, 0, &ids[..end]).unwrap());
            }
        }
        all
    }),
    ("prefill in chunks", |model, sequences| {
        let mut cache = KvCache::new(model, 1, 64);
        let mut all = Vec::new();
        for ids in sequences {
            for end in FROM..=ids.len() {
                cache.clear(0);
                let mut logits = Vec::new();
                for chunk in ids[..end].chunks(1 + end % 5) {
                    logits = model.prefill(&mut cache, 0, chunk).unwrap();
                }
                all.extend(logits);
            }
        }
        all
    }),
    ("decode, batch of 1", |model, sequences| {
        let mut cache = KvCache::new(model, 3, 64);
        let mut all = Vec::new();
        for ids in sequences {
            cache.clear(0);
            all.extend(model.prefill(&mut cache, 0, &ids[..FROM]).unwrap());
            for &id in &ids[FROM..] {
                all.extend(model.decode(&mut cache, &[id]).unwrap().concat());
            }
        }
        all
    }),
    ("decode, all together", |model, sequences| {
        let mut cache = KvCache::new(model, sequences.len(), 64);
        let mut all: Vec<Vec<f32>> = Vec::new();
        for (slot, ids) in sequences.iter().enumerate() {
            all.push(model.prefill(&mut cache, slot, &ids[..FROM]).unwrap());
        }
        // slots of sequences that have ended stay empty, as in an engine
        for step in FROM.. {
            let running = (0..).zip(sequences).filter(|(_, ids)| ids.len() > step);
            let segments: Vec<(usize, &[u32])> = running.map(|(slot, ids)| (slot, &ids[step..=step])).collect();
            if segments.is_empty() {
                break;
            }
            for (&(slot, _), logits) in segments.iter().zip(model.advance(&mut cache, &segments, None).unwrap()) {
                all[slot].extend(logits);
            }
        }
        all.concat()
    }),
    ("after a copied prefix", |model, sequences| {
        // each continuation starts from a copy of a longer sequence's first tokens
        let mut cache = KvCache::new(model, 2, 64);
        let mut all = Vec::new();
        for ids in sequences {
            cache.clear(0);
            model.prefill(&mut cache, 0, ids).unwrap();
            for end in FROM..=ids.len() {
                cache.copy_prefix(0, 1, end - 1);
                all.extend(model.prefill(&mut cache, 1, &ids[end - 1..end]).unwrap());
                cache.copy_prefix(1, 1, end / 2);
                let again = model.prefill(&mut cache, 1, &ids[end / 2..end]).unwrap();
                assert_eq!(again, all[all.len() - again.len()..]);
            }
        }
        all
    }),
    ("decode beside prompts", |model, sequences| {
        // One sequence decodes in the same pass as another's prefill.
        let mut cache = KvCache::new(model, 2, 64);
        let mut all = Vec::new();
        for (i, ids) in sequences.iter().enumerate() {
            let other = &sequences[(i + 1) % sequences.len()];
            cache.clear(0);
            all.extend(model.prefill(&mut cache, 0, &ids[..FROM]).unwrap());
            for (t, id) in ids.iter().enumerate().skip(FROM) {
                cache.clear(1);
                let segments = [(1, &other[..1 + t % other.len()]), (0, std::slice::from_ref(id))];
                all.extend(model.advance(&mut cache, &segments, None).unwrap().swap_remove(1));
            }
        }
        all
    }),
];
