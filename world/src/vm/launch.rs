//! Starts QEMU: its command line, the walls around it, and that it dies with this process.
//!
//! QEMU runs in namespaces of its own (bubblewrap): no network, no other processes, no files but the
//! image, the snapshot and its own folder, no capabilities. Its seccomp filter lets it start no program
//! and gain no privilege.

use std::fs::File;
use std::io;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Sender, SyncSender, channel, sync_channel};
use std::sync::{Mutex, PoisonError};

use super::image::{DISK, INITRAMFS, KERNEL};
use super::{Accelerator, Options};
use crate::provider::Error;

pub(super) const CONTROL_SOCKET: &str = "control";
pub(super) const AGENT_SOCKET: &str = "agent";
pub(super) const MIGRATION_SOCKET: &str = "migration";
/// What QEMU says.
pub(super) const LOG: &str = "log";
/// What the kernel of the machine that boots says.
pub(super) const CONSOLE: &str = "console";
pub(super) const MEMORY: &str = "memory";
pub(super) const STATE: &str = "state";
/// The machine's own folder, as QEMU sees it.
pub(super) const OWN: &str = "/run/world";

/// Where a machine's memory comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Start {
    /// It boots, and its memory is the file of the snapshot.
    Boot,
    /// It has the pages of the snapshot's file until it writes to them. It waits for its state.
    Fork,
}

/// Starts a machine. `own` is its folder, `snapshot` has or gets memory and state.
pub(super) fn launch(options: &Options, own: &Path, snapshot: &Path, start: Start) -> Result<Child, Error> {
    let unusable = |what: &str, error: &io::Error| Error::Unusable(format!("{what}: {error}"));
    let log = File::create(own.join(LOG)).map_err(|error| unusable("create the log of a machine", &error))?;
    let input = match start {
        Start::Boot => Stdio::null(),
        Start::Fork => File::open(snapshot.join(STATE))
            .map_err(|error| unusable("open the snapshot's state", &error))?
            .into(),
    };
    let mut command = Command::new("bwrap");
    command.args(walls(options, own, snapshot)).arg("qemu-system-x86_64");
    command.args(machine(options, start));
    let errors = log.try_clone().map_err(|error| unusable("share the log", &error))?;
    command.env_clear().env("PATH", "/usr/bin:/bin").current_dir("/");
    command.stdin(input).stdout(log).stderr(errors);
    spawn(command).map_err(|error| match error.kind() {
        io::ErrorKind::NotFound => {
            Error::Unusable("bwrap is missing: install bubblewrap and qemu-system-x86".to_owned())
        }
        _ => unusable("start a machine", &error),
    })
}

/// What bubblewrap leaves of this machine.
fn walls(options: &Options, own: &Path, snapshot: &Path) -> Vec<String> {
    let text = |path: &Path| path.to_string_lossy().into_owned();
    let mut words: Vec<String> = Vec::new();
    let mut add = |parts: &[&str]| words.extend(parts.iter().map(|part| (*part).to_owned()));
    add(&[
        "--unshare-all",
        "--die-with-parent",
        "--new-session",
        "--clearenv",
        "--cap-drop",
        "ALL",
    ]);
    add(&["--uid", "65534", "--gid", "65534", "--hostname", "world"]);
    add(&[
        "--ro-bind",
        "/usr",
        "/usr",
        "--symlink",
        "usr/lib",
        "/lib",
        "--symlink",
        "usr/lib64",
        "/lib64",
    ]);
    add(&[
        "--symlink",
        "usr/bin",
        "/bin",
        "--ro-bind-try",
        "/etc/ld.so.cache",
        "/etc/ld.so.cache",
    ]);
    add(&["--dev", "/dev"]);
    if options.accelerator == Accelerator::Kvm {
        add(&["--dev-bind", "/dev/kvm", "/dev/kvm"]);
    }
    add(&["--ro-bind", &text(&options.image), "/image", "--bind", &text(own), OWN]);
    // QEMU opens the file for writing, also where it maps it privately.
    add(&["--bind", &text(&snapshot.join(MEMORY)), "/memory", "--"]);
    words
}

/// The machine. Every fork has the same devices as the machine that booted.
fn machine(options: &Options, start: Start) -> Vec<String> {
    let mut words: Vec<String> = Vec::new();
    let mut add = |parts: &[&str]| words.extend(parts.iter().map(|part| (*part).to_owned()));
    let memory = format!("{}M", options.memory_mib);
    let share = if start == Start::Boot { "on" } else { "off" };
    add(&["-nodefaults", "-no-user-config", "-display", "none", "-no-reboot"]);
    add(&[
        "-sandbox",
        "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny",
    ]);
    add(&["-machine", "pc,memory-backend=ram,usb=off,vmport=off", "-m", &memory]);
    add(&["-smp", &options.cpus.to_string()]);
    match options.accelerator {
        // Not every nested KVM can set this register, and the guest needs no hint of it.
        Accelerator::Kvm => add(&["-accel", "kvm", "-cpu", "host,arch-capabilities=off"]),
        Accelerator::Tcg => add(&["-accel", "tcg,tb-size=64", "-cpu", "max"]),
    }
    add(&[
        "-object",
        &format!("memory-backend-file,id=ram,size={memory},mem-path=/memory,share={share}"),
    ]);
    add(&[
        "-kernel",
        &format!("/image/{KERNEL}"),
        "-initrd",
        &format!("/image/{INITRAMFS}"),
    ]);
    // A kernel that panics reboots, and `-no-reboot` makes that the end of QEMU. Its check of the timer
    // fails where the host is overloaded.
    let kernel = format!(
        "console=ttyS0 quiet panic=-1 no_timer_check world.disk={}m",
        options.disk_mib
    );
    add(&["-append", &kernel]);
    add(&[
        "-drive",
        &format!("id=root,file=/image/{DISK},format=raw,if=none,readonly=on"),
    ]);
    add(&["-device", "virtio-blk-pci,drive=root", "-device", "virtio-serial-pci"]);
    add(&[
        "-chardev",
        &format!("socket,id=agent,path={OWN}/{AGENT_SOCKET},server=on,wait=off"),
    ]);
    add(&["-device", "virtserialport,chardev=agent,name=agent"]);
    add(&["-qmp", &format!("unix:{OWN}/{CONTROL_SOCKET},server=on,wait=off")]);
    match start {
        Start::Boot => add(&["-serial", &format!("file:{OWN}/{CONSOLE}")]),
        // What a world says here would fill the disk of the host.
        Start::Fork => add(&["-serial", "null", "-S", "-incoming", "defer"]),
    }
    words
}

type Job = (Command, SyncSender<io::Result<Child>>);

/// Starts a process that is killed when this one ends, however it ends. The kernel ties it to the
/// thread that started it, so one thread starts all of them and never ends.
fn spawn(command: Command) -> io::Result<Child> {
    static STARTER: Mutex<Option<Sender<Job>>> = Mutex::new(None);
    let ended = || io::Error::other("the thread that starts machines has ended");
    let (answer, answered) = sync_channel(1);
    {
        let mut starter = STARTER.lock().unwrap_or_else(PoisonError::into_inner);
        let jobs = match &mut *starter {
            Some(jobs) => jobs,
            none => {
                let (jobs, waiting) = channel::<Job>();
                std::thread::Builder::new()
                    .name("machine-starter".to_owned())
                    .spawn(move || {
                        for (mut command, answer) in waiting {
                            // The caller waits for it.
                            let _ = answer.send(command.spawn());
                        }
                    })?;
                none.insert(jobs)
            }
        };
        jobs.send((command, answer)).map_err(|_| ended())?;
    }
    answered.recv().map_err(|_| ended())?
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_machine_has_no_network_and_shares_memory_only_while_it_boots() {
        let options = Options::default();
        for (start, share) in [(Start::Boot, "share=on"), (Start::Fork, "share=off")] {
            let words = machine(&options, start);
            assert!(words.iter().any(|word| word.ends_with(share)), "{words:?}");
            assert!(words.contains(&"-nodefaults".to_owned()));
            assert!(!words.iter().any(|word| word.contains("net")), "{words:?}");
        }
    }

    #[test]
    fn only_machines_on_kvm_see_its_device() {
        let shown = |accelerator| {
            let options = Options {
                accelerator,
                ..Options::default()
            };
            walls(&options, Path::new("/own"), Path::new("/snapshot")).contains(&"/dev/kvm".to_owned())
        };
        assert!(shown(Accelerator::Kvm));
        assert!(!shown(Accelerator::Tcg));
    }
}
