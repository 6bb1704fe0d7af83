//! vLLM servers on this machine, which answer instead of our own engine: `[stack.vllm]`. They
//! start with the policy's base and get the versions of the assignment from the role `serve`.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, ensure};
use artifact::checkpoint::Checkpoint;
use artifact::quant::{self, Spec};
use artifact::threads::Threads;
use nix::sys::signal::Signal;

use super::exec;

/// Supervised under these names.
const NAMES: [&str; 8] = [
    "vllm-1", "vllm-2", "vllm-3", "vllm-4", "vllm-5", "vllm-6", "vllm-7", "vllm-8",
];
pub const STOP: Signal = Signal::SIGTERM;
/// Those that vLLM knows. It computes each adapter at the largest rank.
const RANKS: [usize; 9] = [1, 8, 16, 32, 64, 128, 256, 320, 512];

edge::options! {
    /// `[stack.vllm]`: vLLM servers that `springtide up` runs.
    #[derive(Eq)]
    pub struct Options {
        /// vLLM's command, in an environment that also has the wheel of `python/`. Without it, no server
        /// is run.
        pub program: Option<PathBuf> = None,
        /// Number of servers, 1 to 8. Each holds one version: learner, champion and base need three.
        pub engines: u16 = 3 => 1..=8,
        /// One server instead, which serves adapters of the base beside each other. For versions of `trainer.realtime.lora`.
        pub adapters: bool = false,
        /// Loopback port of the first server; the others take the next ones.
        pub port: u16 = 8110,
        /// Further arguments of `vllm serve`.
        pub args: Vec<String> = ["--dtype", "float32", "--max-num-batched-tokens", "4096"].map(str::to_owned).into(),
    }
}

impl Options {
    pub fn check(&self) -> anyhow::Result<()> {
        self.check_ranges("stack.vllm")?;
        ensure!(
            self.port.checked_add(self.engines).is_some() && self.port > 0,
            "stack.vllm.port is {}; the last server's port would be above 65535",
            self.port
        );
        Ok(())
    }

    /// Names and ports of the servers.
    pub fn servers(&self) -> impl Iterator<Item = (&'static str, u16)> {
        let engines = if self.adapters { 1 } else { self.engines };
        let engines = self.program.as_ref().map_or(0, |_| engines);
        NAMES.into_iter().zip((self.port..).take(engines.into()))
    }
}

pub fn url(port: u16) -> String {
    format!("http://127.0.0.1:{port}")
}

/// The folder in `state_dir` with the copy of `base`, which an engine starts with. Made unless it is there.
pub fn copy_of(base: &Path, spec: Spec, state_dir: &Path, port: u16) -> anyhow::Result<PathBuf> {
    let version = Checkpoint::map_dir(base)?;
    let folder = state_dir.join(format!("base-{spec}-{}", version.root().short()));
    if folder.exists() {
        return Ok(folder);
    }
    let copy = quant::quantize(&version, spec, &Threads::ONE).context("policy.serves")?;
    // several engines start at once: whoever is first names the folder
    let fresh = state_dir.join(format!(".base-{spec}-{port}"));
    let _ = std::fs::remove_dir_all(&fresh);
    copy.write_dir(&fresh)?;
    if let Err(error) = std::fs::rename(&fresh, &folder) {
        let _ = std::fs::remove_dir_all(&fresh);
        ensure!(folder.exists(), "name {}: {error}", folder.display());
    }
    Ok(folder)
}

/// Arguments of a server that takes adapters of at most this rank. Learner, champion, a canary and one that retires are
/// sampled together; more wait in the host's memory.
fn adapters(rank: usize) -> anyhow::Result<impl Iterator<Item = String>> {
    let largest = RANKS.into_iter().find(|&known| known >= rank);
    let largest = largest.with_context(|| format!("vLLM serves adapters up to rank 512, and this one has {rank}"))?;
    let arguments = format!("--enable-lora --max-lora-rank {largest} --max-loras 4 --max-cpu-loras 16");
    Ok(arguments.split(' ').map(str::to_owned).collect::<Vec<_>>().into_iter())
}

/// The command of one server. `slots`: sequences that it samples together. `rank`: the largest of its adapters.
pub fn command(
    options: &Options,
    base: &Path,
    name: &str,
    (slots, rank): (usize, Option<usize>),
    port: u16,
) -> anyhow::Result<Command> {
    let program = options.program.as_deref().context("stack.vllm.program is not set")?;
    let tie = exec::Tie {
        signal: STOP,
        user: None,
    };
    let mut command = exec::tied(program, tie)?;
    command
        .arg("serve")
        .arg(base)
        .args(["--served-model-name", name, "--host", "127.0.0.1"])
        .args(["--port", &port.to_string(), "--max-num-seqs", &slots.to_string()])
        // token ids in and out, and which weights sampled them
        .arg("--enable-scale-out")
        // of the distribution that was sampled from
        .args(["--logprobs-mode", "processed_logprobs"])
        .args(["--weight-transfer-config", r#"{"backend":"springtide"}"#])
        .args(rank.map(adapters).transpose()?.into_iter().flatten())
        .args(&options.args)
        // the routes that take new weights; only loopback reaches them
        .env("VLLM_SERVER_DEV_MODE", "1")
        // the routes that load adapters
        .env("VLLM_ALLOW_RUNTIME_LORA_UPDATING", rank.is_some().to_string())
        .env("VLLM_NO_USAGE_STATS", "1")
        .env("DO_NOT_TRACK", "1")
        .env("HF_HUB_OFFLINE", "1");
    for (name, value) in [("VLLM_CPU_KVCACHE_SPACE", "1"), ("OMP_NUM_THREADS", "1")] {
        if std::env::var_os(name).is_none() {
            command.env(name, value);
        }
    }
    Ok(command)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn servers_have_names_and_neighboring_ports_once_there_is_a_program() {
        let mut options = Options::default();
        options.check().unwrap();
        assert_eq!(options.servers().count(), 0);
        options.program = Some("vllm".into());
        let servers: Vec<_> = options.servers().collect();
        assert_eq!(servers, [("vllm-1", 8110), ("vllm-2", 8111), ("vllm-3", 8112)]);
        options.engines = 9;
        assert!(options.check().unwrap_err().to_string().contains("1 to 8"));
    }
}
