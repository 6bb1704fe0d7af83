//! `springtide stack exec`: the last step before Postgres or the JVM takes over the process. It gives up root where the
//! program refuses it and asks the kernel for a signal when the parent dies, so that not even `kill -9` of a supervisor
//! leaves a child behind. Done here, between fork and exec, because here it needs no unsafe code.
//!
//! The kernel watches the *thread* that started the child: start children from a thread that lives as long as the process.

use std::convert::Infallible;
use std::ffi::OsString;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, bail};
use nix::sys::prctl;
use nix::sys::signal::Signal;
use nix::unistd::{Gid, Pid, Uid, getppid, setgid, setgroups, setuid};

/// The user and group that Postgres runs as where Springtide was started by root: `nobody` on every distribution.
pub const NOBODY: u32 = 65534;

/// What `springtide stack exec` is told.
#[derive(Debug, Clone, clap::Args)]
pub struct Args {
    /// Process that must be alive: the one that started this.
    #[arg(long)]
    parent: i32,
    /// Signal to get when it dies, e.g. SIGTERM.
    #[arg(long)]
    signal: Signal,
    /// Run as the unprivileged user `nobody`.
    #[arg(long)]
    drop_root: bool,
    program: PathBuf,
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    args: Vec<OsString>,
}

/// How a child should be tied to this process.
#[derive(Debug, Clone, Copy)]
pub struct Tie {
    /// What the child gets when this process dies in any way.
    pub signal: Signal,
    pub drop_root: bool,
}

/// A command that runs `program` tied to this process; arguments may still be added.
pub fn tied(program: &Path, tie: Tie) -> anyhow::Result<Command> {
    let mut command = own_binary()?;
    command.args(["stack", "exec", "--parent"]);
    command.arg(std::process::id().to_string());
    command.args(["--signal", tie.signal.as_str()]);
    if tie.drop_root {
        command.arg("--drop-root");
    }
    command.arg("--").arg(program);
    // A group of its own: Ctrl-C in the terminal reaches the supervisor, which then stops things in order.
    command.process_group(0);
    Ok(command)
}

/// A command that runs this very program. Where its file was replaced by a newer build meanwhile, still this one.
pub fn own_binary() -> anyhow::Result<Command> {
    let path = std::env::current_exe().context("find own executable")?;
    if path.exists() {
        return Ok(Command::new(path));
    }
    let mut command = Command::new("/proc/self/exe");
    command.arg0("springtide");
    Ok(command)
}

/// Asks for `signal` when `parent` dies; refuses when it is already dead.
pub fn die_with(parent: i32, signal: Signal) -> anyhow::Result<()> {
    prctl::set_pdeathsig(signal).context("ask for a signal on the parent's death")?;
    if getppid() != Pid::from_raw(parent) {
        bail!("the process that started this one, {parent}, is gone");
    }
    Ok(())
}

/// Becomes the program; returns only with an error.
pub fn run(args: &Args) -> anyhow::Result<Infallible> {
    if args.drop_root {
        setgroups(&[]).context("give up supplementary groups")?;
        setgid(Gid::from_raw(NOBODY)).context("give up the group root")?;
        setuid(Uid::from_raw(NOBODY)).context("give up the user root")?;
    }
    die_with(args.parent, args.signal)?; // after setuid, which clears it
    let error = Command::new(&args.program).args(&args.args).exec();
    Err(error).with_context(|| format!("execute {}", args.program.display()))
}
