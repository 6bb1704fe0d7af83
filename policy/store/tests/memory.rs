//! A follower's memory: the version it holds, the next version, and the delta.
//!
//! Each follower runs in its own process, which reports how far its resident memory rose, or, with a
//! budget, the part of it that is not pages of files.

#![cfg(target_os = "linux")]
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use artifact::checkpoint::Checkpoint;
use artifact::delta;
use artifact::manifest::{Manifest, Parent};
use artifact::sign::SigningKey;
use artifact::tensor::TensorData;
use artifact::threads::Threads;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use store::Store;

const STORE: &str = "SPRINGTIDE_MEMORY_STORE";
const HOLDS: &str = "SPRINGTIDE_MEMORY_HOLDS";
const BUDGET: &str = "SPRINGTIDE_MEMORY_BUDGET";
const POLICY: &str = "demo";
/// One version has twelve tensors of two frames.
const VERSION_BYTES: usize = 12 * TENSOR_BYTES;
const TENSOR_BYTES: usize = 4 << 20;

/// A field of `/proc/self/status` in bytes.
fn status(field: &str) -> usize {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with(field)).unwrap();
    let kilobytes = line.split_whitespace().nth(1).unwrap();
    kilobytes.parse::<usize>().unwrap() * 1024
}

/// Runs a test of this file in its own process and returns the rise that it prints.
fn risen(test: &str, set: &[(&str, &str)]) -> usize {
    let mut child = Command::new(std::env::current_exe().unwrap());
    child
        .args(["--exact", test, "--nocapture"])
        // Makes glibc return freed memory at once, so that only used memory is measured.
        .env("MALLOC_MMAP_THRESHOLD_", "65536")
        .envs(set.iter().copied());
    let output = child.output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(
        output.status.success(),
        "{text}{}",
        String::from_utf8_lossy(&output.stderr)
    );
    let (_, rest) = text.split_once("rose by ").unwrap();
    rest.split_whitespace().next().unwrap().parse().unwrap()
}

fn key() -> SigningKey {
    SigningKey::from_seed(&[7; 32])
}

/// About one weight in a hundred differs from the previous version.
fn version(number: i64) -> Checkpoint {
    let tensor = |name: u32| {
        let weights = (0..TENSOR_BYTES as u32 / 2).flat_map(|at| {
            let random = (at ^ name << 22).wrapping_mul(2_654_435_761);
            let moved = (1..number as u32)
                .filter(|step| (random >> 5) % 101 == step % 101)
                .count() as u16;
            (0x3c00 + (random >> 23) as u16 + moved).to_le_bytes()
        });
        let bytes: Vec<u8> = weights.collect();
        TensorData::new(safetensors::Dtype::BF16, vec![TENSOR_BYTES / 2], bytes).unwrap()
    };
    Checkpoint {
        tensors: (0..12).map(|name| (format!("w{name:02}"), tensor(name))).collect(),
        ..Checkpoint::default()
    }
}

/// Three versions: a checkpoint and two deltas.
async fn publish(folder: &Path) -> usize {
    let store = Store::open(&format!("file://{}", folder.display())).unwrap();
    let mut before: Option<(Manifest, Checkpoint)> = None;
    let mut delta_bytes = 0;
    for number in 1..=3 {
        let checkpoint = version(number);
        let mut manifest = Manifest {
            policy: POLICY.into(),
            version: number,
            root: checkpoint.root(),
            parent: None,
            line: "realtime".into(),
            branch: 0,
            checkpoint: None,
            delta: None,
            tensor_bytes: checkpoint.tensor_bytes(),
            run: None,
            fence: 1,
            created_at: time::OffsetDateTime::now_utc(),
            quantized: vec![],
            delta_shards: vec![],
            reference: None,
            adapts: None,
        };
        if let Some((parent, base)) = &before {
            let (version, root) = (parent.version, parent.root);
            manifest.parent = Some(Parent { version, root });
            let delta = delta::encode(base, &checkpoint, &Threads::ONE).unwrap();
            delta_bytes = delta.len();
            manifest.delta = Some(store.put_object(POLICY, &delta.into()).await.unwrap());
        } else {
            let object = checkpoint.to_bytes().unwrap();
            manifest.checkpoint = Some(store.put_object(POLICY, &object).await.unwrap());
        }
        store.put_manifest(&manifest, &key()).await.unwrap();
        before = Some((manifest, checkpoint));
    }
    delta_bytes
}

/// Does nothing unless the test below starts it in its own process.
#[test]
fn one_version_restored() {
    let Ok(folder) = std::env::var(STORE) else { return };
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    runtime.block_on(async {
        let budget: Option<u64> = std::env::var(BUDGET).ok().map(|bytes| bytes.parse().unwrap());
        if let Some(bytes) = budget {
            artifact::memory::budget(bytes, &Path::new(&folder).join("weights"));
        }
        let store = Store::open(&format!("file://{folder}")).unwrap();
        let trusted = key().trusted();
        let mut held: Vec<(i64, Arc<Checkpoint>)> = vec![];
        if std::env::var(HOLDS).is_ok() {
            let first = store.materialize(POLICY, 1, &trusted, &[]).await.unwrap();
            held.push((1, first.checkpoint));
        }
        let before = status(if budget.is_some() { "RssAnon" } else { "VmRSS" });
        // Resets the peak.
        std::fs::write("/proc/self/clear_refs", "5").unwrap();
        let target = if held.is_empty() { 1 } else { 3 };
        let done = Arc::new(AtomicBool::new(false));
        let watching = std::thread::spawn({
            let done = done.clone();
            move || {
                let mut highest = 0;
                while !done.load(Ordering::Relaxed) {
                    highest = highest.max(status("RssAnon"));
                }
                highest
            }
        });
        let rebuilt = store.materialize(POLICY, target, &trusted, &held).await.unwrap();
        done.store(true, Ordering::Relaxed);
        let anonymous = watching.join().unwrap();
        let rose = if budget.is_some() { anonymous } else { status("VmHWM") } - before;
        assert_eq!(rebuilt.checkpoint.root(), version(target).root());
        println!("rose by {rose}");
    });
}

#[test]
fn a_follower_needs_room_for_the_next_version_and_its_delta() {
    let folder = tempfile::tempdir().unwrap();
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    let delta_bytes = runtime.block_on(publish(folder.path()));
    assert!(delta_bytes < VERSION_BYTES / 50, "{delta_bytes}");
    let path = folder.path().to_str().unwrap();
    let first = risen("one_version_restored", &[(STORE, path)]);
    let next = risen("one_version_restored", &[(STORE, path), (HOLDS, "1")]);
    println!(
        "a version of {VERSION_BYTES} bytes: {first} from its checkpoint; {next} beside version 1 for version 3, over two deltas of about {delta_bytes} bytes"
    );
    // Frame buffers, and what the allocator keeps of them: less than another version would need.
    let slack = VERSION_BYTES / 2;
    assert!(
        first < VERSION_BYTES + slack,
        "{first} bytes for a checkpoint of {VERSION_BYTES}"
    );
    // Intermediate versions are dropped, so at most two exist beside the held one.
    assert!(
        next < 2 * VERSION_BYTES + delta_bytes + slack,
        "{next} bytes beside version 1"
    );
    assert!(
        first > VERSION_BYTES / 2 && next > VERSION_BYTES / 2,
        "nothing was measured: {first}, {next}"
    );
}

#[test]
fn what_exceeds_the_budget_takes_no_memory_of_its_own() {
    let folder = tempfile::tempdir().unwrap();
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    runtime.block_on(publish(folder.path()));
    let (path, budget) = (folder.path().to_str().unwrap(), 2 * TENSOR_BYTES);
    let bytes = budget.to_string();
    for holds in [None, Some((HOLDS, "1"))] {
        let mut set = vec![(STORE, path), (BUDGET, bytes.as_str())];
        set.extend(holds);
        let rose = risen("one_version_restored", &set);
        println!("{rose} bytes with a budget of {budget}, for versions of {VERSION_BYTES}");
        // the budget, four parts of 8 MiB that are under way, and buffers of frames
        assert!(rose < VERSION_BYTES, "{rose} bytes, {holds:?}");
    }
    let left = std::fs::read_dir(folder.path().join("weights")).unwrap();
    assert_eq!(left.count(), 0, "files without a name");
}
