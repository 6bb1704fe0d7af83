//! Whatever is wrong with a store, or with the versions that a reader claims to hold, the result is
//! the requested version, bit for bit, or an error. `make chaos NAME=delta` runs more trials
//! (`SPRINGTIDE_FAULTS_TRIALS`).

use object_store::memory::InMemory;
use rand::rngs::StdRng;
use rand::{Rng as _, SeedableRng as _};
use std::collections::{BTreeMap, BTreeSet};

use super::*;
use artifact::squash::SquashedDelta;

const VERSIONS: i64 = 24;
/// Pairs of versions with a squashed delta between them.
const FOLDS: [(usize, usize); 4] = [(1, 9), (4, 12), (9, 17), (14, 22)];

fn trials(default: u32) -> u32 {
    let set = std::env::var("SPRINGTIDE_FAULTS_TRIALS").ok();
    set.map_or(default, |text| text.parse().unwrap())
}

/// The entries of an undamaged store.
struct History {
    versions: Vec<(Manifest, Arc<Checkpoint>)>,
    squashed_deltas: Vec<SquashedDelta>,
    entries: Vec<(Path, Bytes)>,
    /// The same manifests, signed by another key.
    forged: BTreeMap<Path, Bytes>,
    keys: TrustedKeys,
}

async fn history() -> History {
    let f = fixture();
    let versions = f.chain(VERSIONS, 7).await;
    let mut squashed_deltas = vec![];
    for (from, to) in FOLDS {
        let (from, to) = (&versions[from - 1].0, &versions[to - 1].0);
        let squashed = f
            .store
            .squash(POLICY, (from, to), 8, u64::MAX, &f.key, &f.trusted())
            .await;
        match squashed.unwrap() {
            SquashOutcome::Created(squashed) => squashed_deltas.push(squashed),
            other => panic!("{other:?}"),
        }
    }
    let forger = fixture();
    for (manifest, _) in &versions {
        let stranger = SigningKey::from_seed(&[9; 32]);
        forger.store.put_manifest(manifest, &stranger).await.unwrap();
    }
    History {
        versions,
        squashed_deltas,
        entries: entries(&f.store).await,
        forged: entries(&forger.store).await.into_iter().collect(),
        keys: f.trusted(),
    }
}

async fn entries(store: &Store) -> Vec<(Path, Bytes)> {
    use futures::TryStreamExt as _;
    let mut entries = vec![];
    let found: Vec<_> = store.backend.list(None).try_collect().await.unwrap();
    for meta in found {
        let bytes = store.backend.get(&meta.location).await.unwrap().bytes().await.unwrap();
        entries.push((meta.location, bytes));
    }
    entries.sort();
    entries
}

/// Damages one entry of a store and returns its name.
async fn spoil(backend: &InMemory, history: &History, random: &mut StdRng) -> Path {
    let (place, bytes) = &history.entries[random.random_range(0..history.entries.len())];
    let mut spoiled = bytes.to_vec();
    match random.random_range(0..6) {
        0 => {
            let _ = backend.delete(place).await;
            return place.clone();
        }
        1 => {
            let bit = random.random_range(0..8 * spoiled.len());
            spoiled[bit / 8] ^= 1 << (bit % 8);
        }
        2 => spoiled.truncate(random.random_range(0..spoiled.len())),
        3 => spoiled.push(random.random()),
        // Replaced by another of its kind: an older manifest, or the object of another version.
        4 => {
            let folder = place.as_ref().rsplit_once('/').unwrap().0;
            let others = history.entries.iter().filter(|(other, _)| {
                other.as_ref().rsplit_once('/').is_some_and(|(of, _)| of == folder) && other != place
            });
            let others: Vec<_> = others.collect();
            spoiled = others[random.random_range(0..others.len())].1.to_vec();
        }
        _ => match history.forged.get(place) {
            Some(forged) => spoiled = forged.to_vec(),
            None => spoiled.clear(),
        },
    }
    backend.put(place, spoiled.into()).await.unwrap();
    place.clone()
}

/// The versions that can be restored forwards from undamaged entries.
fn restorable(history: &History, spoiled: &BTreeSet<Path>, held: &[(i64, bool)]) -> BTreeSet<i64> {
    let object = |object: Option<ObjectRef>| {
        object.is_some_and(|object| !spoiled.contains(&object_key(POLICY, &object.digest).unwrap()))
    };
    let document = |serial: i64| {
        let place = format!("policy/{POLICY}/version/{serial:010}.json");
        !spoiled.contains(&Path::from(place))
    };
    let mut restorable = BTreeSet::new();
    for (manifest, _) in &history.versions {
        let serial = manifest.version;
        let own = document(serial);
        let by_delta = manifest
            .parent
            .is_some_and(|parent| restorable.contains(&parent.version) && object(manifest.delta));
        let by_squashed = history.squashed_deltas.iter().any(|squashed| {
            let place = format!("policy/{POLICY}/fold/{serial:010}-{:010}.json", squashed.from.version);
            squashed.to.version == serial
                && restorable.contains(&squashed.from.version)
                && object(Some(squashed.delta))
                && !spoiled.contains(&Path::from(place))
        });
        if own && (object(manifest.checkpoint) || held.contains(&(serial, true)) || by_delta || by_squashed) {
            restorable.insert(serial);
        }
    }
    restorable
}

#[tokio::test]
async fn a_damaged_store_returns_the_right_version_or_an_error() {
    let history = history().await;
    let (mut right, mut healed, mut refused) = (0, 0, 0);
    let count = trials(400);
    for trial in 0..count {
        let mut random = StdRng::seed_from_u64(trial.into());
        let backend = InMemory::new();
        for (place, bytes) in &history.entries {
            backend.put(place, bytes.clone().into()).await.unwrap();
        }
        let mut spoiled = BTreeSet::new();
        for _ in 0..random.random_range(0..24) {
            spoiled.insert(spoil(&backend, &history, &mut random).await);
        }
        // The reader may hold another version than it claims.
        let (mut have, mut held) = (vec![], vec![]);
        for _ in 0..random.random_range(0..3) {
            let serial = random.random_range(1..=VERSIONS);
            let truly = random.random_range(0..3) > 0;
            let is = if truly {
                serial
            } else {
                random.random_range(1..=VERSIONS)
            };
            have.push((serial, history.versions[is as usize - 1].1.clone()));
            held.retain(|&(other, _)| other != serial);
            held.push((serial, serial == is));
        }
        let serial = random.random_range(1..=VERSIONS);
        let store = Store::over(Arc::new(backend));
        let must = restorable(&history, &spoiled, &held).contains(&serial);
        match store.materialize(POLICY, serial, &history.keys, &have).await {
            Ok(rebuilt) => {
                let (manifest, checkpoint) = &history.versions[serial as usize - 1];
                assert_eq!(rebuilt.checkpoint, *checkpoint, "trial {trial}");
                assert_eq!(rehashed(&rebuilt.checkpoint), manifest.root, "trial {trial}");
                match spoiled.is_empty() {
                    true => right += 1,
                    false => healed += 1,
                }
            }
            Err(error) => {
                assert!(!must, "trial {trial}, version {serial}: {error}");
                refused += 1;
            }
        }
    }
    println!(
        "{count} trials: {right} of a sound store, {healed} rebuilt from a spoiled one, {refused} refused, 0 wrong"
    );
    assert!(healed > 0 && refused > 0);
}

#[tokio::test]
async fn a_chain_with_missing_deltas_recovers_at_the_next_checkpoint() {
    let history = history().await;
    let count = trials(100);
    for trial in 0..count {
        let mut random = StdRng::seed_from_u64(trial.into());
        let backend = InMemory::new();
        for (place, bytes) in &history.entries {
            backend.put(place, bytes.clone().into()).await.unwrap();
        }
        // Some deltas between a follower and the checkpoint of version 21 are missing.
        let at = random.random_range(1..=19);
        let missing = random.random_range(1..=21 - at);
        for _ in 0..missing {
            let lost = history.versions[random.random_range(at..21) as usize].0.delta.unwrap();
            let _ = backend.delete(&object_key(POLICY, &lost.digest).unwrap()).await;
        }
        let store = Store::over(Arc::new(backend));
        let have = [(at, history.versions[at as usize - 1].1.clone())];
        let serial = random.random_range(21..=VERSIONS);
        let rebuilt = store.materialize(POLICY, serial, &history.keys, &have).await.unwrap();
        assert_eq!(
            rehashed(&rebuilt.checkpoint),
            history.versions[serial as usize - 1].0.root
        );
    }
    println!("{count} broken chains: {count} healed");
}

#[tokio::test]
async fn a_delta_is_refused_on_every_other_base() {
    let count = trials(100).clamp(10, 101) as i64;
    let checkpoints: Vec<Checkpoint> = (1..=count).map(weights).collect();
    let deltas: Vec<Vec<u8>> = checkpoints
        .windows(2)
        .map(|two| delta::encode(&two[0], &two[1], &Threads::ONE).unwrap())
        .collect();
    let mut pairs = 0;
    for (n, bytes) in deltas.iter().enumerate() {
        for (m, checkpoint) in checkpoints.iter().enumerate().filter(|&(m, _)| m != n) {
            let refused = delta::apply(checkpoint, bytes, &Threads::ONE);
            assert!(matches!(refused, Err(delta::Error::WrongBase { .. })), "{n} on {m}");
            if m != n + 1 {
                let refused = delta::apply_reverse(checkpoint, bytes, &Threads::ONE);
                assert!(
                    matches!(refused, Err(delta::Error::WrongBase { .. })),
                    "{n} back from {m}"
                );
            }
            pairs += 1;
        }
    }
    println!("{pairs} deltas on other versions than their own, forward and back: all refused");
}
