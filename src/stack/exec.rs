//! `springtide stack exec`: replaces itself with Postgres or the JVM. Before that it becomes an
//! unprivileged user if root has started it, and asks the kernel for a signal when the parent dies, so that
//! even `kill -9` of a supervisor leaves no child behind. A process of its own does this between
//! fork and exec without unsafe code.
//!
//! The kernel watches the *thread* that started the child: start children from a thread that lives
//! as long as the process.

use std::convert::Infallible;
use std::ffi::OsString;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, bail, ensure};
use nix::sys::prctl;
use nix::sys::signal::Signal;
use nix::unistd::{Gid, Pid, Uid, getppid, setgid, setgroups, setuid};

/// User and group of Postgres and Kafka when root starts Springtide. No convention assigns this id
/// (systemd reserves 65520 to 65533), so nothing else on the machine runs as it. As `nobody`, they
/// would share their files with every other program that runs as `nobody`.
pub const SERVER_USER: u32 = 65_530;
/// `nobody` on every distribution: for a program that must find its user's name.
pub const NOBODY: u32 = 65_534;

#[derive(Debug, Clone, clap::Args)]
pub struct Args {
    /// The parent; it must be alive.
    #[arg(long)]
    parent: i32,
    /// Signal to get when the parent dies, e.g. SIGTERM.
    #[arg(long)]
    signal: Signal,
    /// Drop root and run as this user and group.
    #[arg(long)]
    user: Option<u32>,
    program: PathBuf,
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    args: Vec<OsString>,
}

/// How a child is tied to this process.
#[derive(Debug, Clone, Copy)]
pub struct Tie {
    /// Signal for the child when this process dies.
    pub signal: Signal,
    /// User and group to run as. `None`: the same as this process.
    pub user: Option<u32>,
}

/// Who Postgres and Kafka run as. `None`: the same user as this process.
pub fn server_user() -> Option<u32> {
    Uid::effective().is_root().then_some(SERVER_USER)
}

/// A command that runs `program` tied to this process; arguments may still be added.
pub fn tied(program: &Path, tie: Tie) -> anyhow::Result<Command> {
    let mut command = own_binary()?;
    command.args(["stack", "exec", "--parent"]);
    command.arg(std::process::id().to_string());
    command.args(["--signal", tie.signal.as_str()]);
    if let Some(user) = tie.user {
        command.arg("--user").arg(user.to_string());
    }
    command.arg("--").arg(program);
    // In a group of its own, Ctrl-C reaches only the supervisor, which then stops things in order.
    command.process_group(0);
    Ok(command)
}

/// A command that runs this program, even if a newer build has replaced its file.
fn own_binary() -> anyhow::Result<Command> {
    let path = std::env::current_exe().context("find own executable")?;
    if path.exists() {
        return Ok(Command::new(path));
    }
    let mut command = Command::new("/proc/self/exe");
    command.arg0("springtide");
    Ok(command)
}

/// A subcommand of this program, as a process that ends with this one.
pub fn own_subcommand(config: Option<&Path>, subcommand: &str) -> anyhow::Result<Command> {
    let mut command = own_binary()?;
    if let Some(config) = config {
        command.arg("--config").arg(config);
    }
    command.args(["--die-with", &std::process::id().to_string(), subcommand]);
    Ok(command)
}

/// Runs a command to its end and returns what it printed. `needs` says what to install if it is
/// missing.
pub fn output(command: &mut Command, needs: &str) -> anyhow::Result<String> {
    let program = command.get_program().display().to_string();
    let output = command.stdin(Stdio::null()).output();
    let output = output.with_context(|| format!("run {program} (needs {needs})"))?;
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    ensure!(
        output.status.success(),
        "{program} failed ({}; needs {needs}):\n{}{}",
        output.status,
        text(&output.stdout),
        text(&output.stderr)
    );
    Ok(text(&output.stdout))
}

/// Asks for `signal` when `parent` dies; fails if it is already dead.
pub fn die_with(parent: i32, signal: Signal) -> anyhow::Result<()> {
    prctl::set_pdeathsig(signal).context("ask for a signal on the parent's death")?;
    if getppid() != Pid::from_raw(parent) {
        bail!("the parent process {parent} has ended");
    }
    Ok(())
}

/// Replaces this process with the program; returns only errors.
pub fn run(args: &Args) -> anyhow::Result<Infallible> {
    if let Some(user) = args.user {
        setgroups(&[]).context("drop supplementary groups")?;
        setgid(Gid::from_raw(user)).context("drop the group root")?;
        setuid(Uid::from_raw(user)).context("drop the user root")?;
    }
    die_with(args.parent, args.signal)?; // after setuid, which clears it
    let error = Command::new(&args.program).args(&args.args).exec();
    Err(error).with_context(|| format!("execute {}", args.program.display()))
}
