//! Ways out of the sandbox, each tried by a small program that says whether it got through. Where that does
//! no harm, the same program also runs outside, where it must get through: so each row can fail.

use crate::*;
use std::fs::File;
use std::net::{TcpListener, UdpSocket};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener};
use std::path::Path;
use std::process::Stdio;
use world::Ended;

/// Where the program must get through.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Outside {
    Always,
    /// Only root gets through.
    AsRoot,
    /// It would do harm, or the machine decides.
    NotTried,
}
use Outside::{Always, AsRoot, NotTried};

/// What the programs use. An attack that raises an error has not got through.
const BEFORE: &str = r#"
import ctypes, errno, fcntl, json, os, platform, signal, socket, stat, subprocess, sys, time
host = json.loads(sys.argv[1])
libc = ctypes.CDLL(None, use_errno=True)
x86 = platform.machine() == "x86_64"
def syscall(number, *arguments):
    "Whether the kernel knows the call."
    ctypes.set_errno(0)
    result = libc.syscall(ctypes.c_long(number), *[ctypes.c_long(a) for a in arguments])
    return result >= 0 or ctypes.get_errno() != errno.ENOSYS
def attack():
"#;
const AFTER: &str = r#"
try: through = bool(attack())
except (OSError, ValueError, AttributeError) as error: through = False; print(repr(error), file=sys.stderr)
print("THROUGH" if through else "HELD")
"#;

#[rustfmt::skip]
const ATTACKS: &[(&str, Outside, &str)] = &[
    // files
    ("reads the passwords of the host", AsRoot, "return open('/etc/shadow').read()"),
    ("reads the users of the host", Always, "return open('/etc/passwd').read()"),
    ("reads a secret of the host", Always, "return open(host['secret']).read() == host['word']"),
    ("reads it through a symbolic link", Always, "os.symlink(host['secret'], 'link'); return open('link').read()"),
    ("reads it through a hard link", Always, "os.link(host['secret'], 'hard'); return open('hard').read()"),
    ("reads it through the parent folders", Always, "return open('../' * 40 + host['secret']).read()"),
    ("writes into a folder of the host", Always, "return open(host['folder'] + '/new', 'w')"),
    ("writes into the system", NotTried, "return open('/usr/new', 'w')"),
    ("writes into the root", NotTried, "return open('/new', 'w')"),
    ("replaces a system's file", NotTried, "os.chmod('/usr/bin/env', 0o777); return True"),
    ("renames the system", NotTried, "os.rename('/usr', '/tmp/usr'); return True"),
    ("sees folders of the host", Always, "return [p for p in ('/home', '/root', '/var', '/run', '/sys', '/boot') if os.path.exists(p)]"),
    ("changes its root", AsRoot, "pid = os.fork()\n if not pid:\n  try: os.chroot('.'); os._exit(0)\n  except OSError: os._exit(1)\n return os.waitpid(pid, 0)[1] == 0"),
    // processes
    ("reads the environment of the host's first process", NotTried, "return open('/proc/1/environ', 'rb').read()"),
    ("reads the environment of its parent", Always, "return open(f'/proc/{os.getppid()}/environ', 'rb').read()"),
    ("reads the memory of its parent", Always, "return open(f'/proc/{os.getppid()}/maps', 'rb').read(1)"),
    ("has variables of its parent", Always, "return set(os.environ) - {'PATH', 'HOME', 'LANG', 'LC_CTYPE', 'PWD', 'OLDPWD', 'SHLVL', '_'}"),
    ("has descriptors of its parent", Always, "return [fd for fd in range(3, 4096) if readable(fd)]"),
    ("uses a descriptor of its parent", Always, "return os.pread(host['descriptor'], 100, 0).decode() == host['word']"),
    ("sees a process of the host", Always, "os.kill(host['process'], 0); return True"),
    ("sees all processes of the host", Always, "return len([p for p in range(2, 100000) if exists(p)]) > 3"),
    ("opens a process of the host", Always, "return os.pidfd_open(host['process'])"),
    ("traces a process", Always, "return libc.ptrace(0, 0, 0, 0) == 0"),
    ("reads another process's memory", Always, "return syscall(310 if x86 else 270, os.getppid(), 0, 0, 0, 0, 0)"),
    ("becomes root", AsRoot, "os.setuid(0); return True"),
    ("has rights of root over files", AsRoot, "open('own', 'w'); os.chown('own', 12345, 12345); return True"),
    ("may gain rights from setuid programs", NotTried, "return libc.prctl(39, 0, 0, 0, 0) != 1"),
    ("makes a setuid program of root", AsRoot, "open('s', 'w'); os.chown('s', 0, 0); os.chmod('s', 0o4755); return True"),
    ("raises its limits", NotTried, "import resource; resource.setrlimit(resource.RLIMIT_NPROC, (10**6, 10**6)); return True"),
    ("has another priority than it was given", AsRoot, "os.setpriority(os.PRIO_PROCESS, 0, -20); return True"),
    // network
    ("connects by TCP", Always, "return socket.create_connection(('127.0.0.1', host['tcp']), 5)"),
    ("sends by UDP", Always, "return socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', host['udp']))"),
    ("listens on IPv6 or IPv4", Always, "return socket.socket(socket.AF_INET).bind(('127.0.0.1', 0)) is None"),
    ("connects to a socket in a file", Always, "return socket.socket(socket.AF_UNIX).connect(host['unix']) is None"),
    ("connects to an abstract socket", Always, "return socket.socket(socket.AF_UNIX).connect(chr(0) + host['abstract']) is None"),
    ("talks to the kernel by netlink", Always, "return socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0)"),
    ("sends raw packets", AsRoot, "return socket.socket(socket.AF_PACKET, socket.SOCK_RAW)"),
    ("talks to the host by vsock", NotTried, "return socket.socket(socket.AF_VSOCK, socket.SOCK_STREAM)"),
    ("uses the kernel's ciphers", NotTried, "return socket.socket(socket.AF_ALG, socket.SOCK_SEQPACKET)"),
    // devices and the kernel
    ("sees a device of the host", Always, "return set(os.listdir('/dev')) - {'null', 'zero', 'full', 'random', 'urandom', 'tty', 'pts', 'ptmx', 'shm', 'fd', 'stdin', 'stdout', 'stderr', 'core'}"),
    ("opens a device for machines, disks or memory", NotTried, "return [d for d in ('kvm', 'vda', 'sda', 'nvme0n1', 'mem', 'kmsg', 'fuse', 'net/tun', 'loop-control') if readable_path('/dev/' + d)]"),
    ("makes a device of characters", AsRoot, "os.mknod('made', stat.S_IFCHR | 0o666, os.makedev(1, 3)); return open('made')"),
    ("makes a device of blocks", AsRoot, "os.mknod('disk', stat.S_IFBLK | 0o666, os.makedev(254, 0)); return True"),
    ("mounts a file system", AsRoot, "return libc.mount(b'none', b'.', b'tmpfs', 0, 0) == 0 and libc.umount2(b'.', 2) == 0"),
    ("makes the system writable", NotTried, "return libc.mount(0, b'/usr', 0, 32 | 4096, 0) == 0"),
    ("unmounts what covers the host", NotTried, "return libc.umount2(b'/', 2) == 0 or libc.umount2(b'/tmp', 2) == 0"),
    ("makes a user namespace", Always, "return libc.unshare(0x10000000) == 0"),
    ("makes a user namespace with a process", Always, "pid = libc.syscall(56 if x86 else 220, 0x10000000 | 17, 0, 0, 0, 0)\n if pid == 0: os._exit(0)\n return pid > 0"),
    ("makes namespaces by clone3", Always, "return syscall(435, 0, 0)"),
    ("joins a namespace", Always, "return syscall(308 if x86 else 268, -1, 0)"),
    ("types into a terminal", Always, "r, w = os.pipe()\n try: fcntl.ioctl(r, 0x5412, b'x')\n except OSError as e: return e.errno != errno.ENOSYS\n return True"),
    ("opens the terminal", NotTried, "return open('/dev/tty')"),
    ("has memory that no limit counts", Always, "return syscall(319 if x86 else 279, 0, 0)"),
    ("has shared memory that no limit counts", Always, "return syscall(29 if x86 else 194, 0, 4096, 0o1600)"),
    ("reads keys of the kernel", NotTried, "return syscall(250 if x86 else 219, 0, -3, 0)"),
    ("adds keys to the kernel", NotTried, "return syscall(248 if x86 else 217, 0, 0, 0, 0, 0)"),
    ("loads BPF", NotTried, "return syscall(321 if x86 else 280, 0, 0, 0)"),
    ("measures the machine", NotTried, "return syscall(298 if x86 else 241, 0, 0, 0, 0, 0)"),
    ("queues calls by io_uring", NotTried, "return syscall(425, 0, 0)"),
    ("handles page faults", NotTried, "return syscall(323 if x86 else 282, 0)"),
    ("opens files by handle", NotTried, "return syscall(304 if x86 else 265, -1, 0, 0)"),
    ("uses the newer calls for mounts", NotTried, "return any(syscall(n, -1, 0, 0, 0, 0) for n in (428, 429, 430, 431, 432, 433, 442))"),
    ("takes a descriptor of another process", NotTried, "return syscall(438, -1, 0, 0)"),
    ("loads a module", NotTried, "return syscall(175 if x86 else 105, 0, 0, 0) or syscall(313 if x86 else 273, -1, 0, 0)"),
    ("loads another kernel", NotTried, "return syscall(246 if x86 else 104, 0, 0, 0, 0)"),
    ("reads the kernel's log", NotTried, "return syscall(103 if x86 else 116, 10, 0, 0)"),
    ("changes how it is run", NotTried, "return syscall(135 if x86 else 92, 0x0040000)"),
    ("uses call numbers of x32", NotTried, "return syscall(0x40000000 | 39) if x86 else False"),
    ("sets the clock", NotTried, "time.clock_settime(time.CLOCK_REALTIME, time.time()); return True"),
    ("names the host", NotTried, "socket.sethostname('taken'); return True"),
    ("restarts the machine", NotTried, "return syscall(169 if x86 else 142, 0, 0, 0, 0)"),
];

const HELPERS: &str = r#"
def readable(fd):
    try: return os.fstat(fd)
    except OSError: return None
def readable_path(path):
    try: return os.open(path, os.O_RDONLY) >= 0
    except OSError: return False
def exists(pid):
    try: os.kill(pid, 0); return True
    except PermissionError: return True
    except OSError: return False
"#;

/// Things on the host that a program tries to reach.
struct Host {
    folder: tempfile::TempDir,
    /// Without `O_CLOEXEC`: programs inherit it unless something prevents it.
    descriptor: OwnedFd,
    process: std::process::Child,
    tcp: TcpListener,
    udp: UdpSocket,
    _unix: UnixListener,
    _abstract: UnixListener,
    abstract_name: String,
}

const WORD: &str = "the word that nobody outside knows";

impl Host {
    fn new() -> Host {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("secret"), WORD).unwrap();
        let file = File::open(folder.path().join("secret")).unwrap();
        let descriptor: OwnedFd = file.into();
        use nix::fcntl::{FcntlArg, FdFlag, fcntl};
        fcntl(&descriptor, FcntlArg::F_SETFD(FdFlag::empty())).unwrap();
        let abstract_name = format!("springtide-{}", folder.path().display());
        let name = SocketAddr::from_abstract_name(&abstract_name).unwrap();
        Host {
            process: std::process::Command::new("sleep")
                .arg("1000")
                .stdin(Stdio::null())
                .stdout(Stdio::null())
                .stderr(Stdio::null())
                .spawn()
                .unwrap(),
            tcp: TcpListener::bind("127.0.0.1:0").unwrap(),
            udp: UdpSocket::bind("127.0.0.1:0").unwrap(),
            _unix: UnixListener::bind(folder.path().join("socket")).unwrap(),
            _abstract: UnixListener::bind_addr(&name).unwrap(),
            abstract_name,
            descriptor,
            folder,
        }
    }

    fn describe(&self) -> String {
        let path = |name| self.folder.path().join(name).display().to_string();
        serde_json::json!({
            "secret": path("secret"), "word": WORD, "folder": self.folder.path(), "unix": path("socket"),
            "abstract": self.abstract_name, "descriptor": self.descriptor.as_raw_fd(),
            "process": self.process.id(), "tcp": self.tcp.local_addr().unwrap().port(),
            "udp": self.udp.local_addr().unwrap().port(),
        })
        .to_string()
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

fn program(attack: &str, host: &str) -> Command {
    let source = format!("{BEFORE} {attack}\n{HELPERS}{AFTER}");
    let mut command = python(&source, patient());
    command.program.push(host.to_owned());
    command
}

/// Runs it where nothing holds it, in a folder of its own on the same file system as the secret.
fn outside(attack: &str, host: &Host) -> String {
    let folder = tempfile::tempdir_in(host.folder.path()).unwrap();
    let command = program(attack, &host.describe());
    let mut process = std::process::Command::new(&command.program[0]);
    let output = process
        .args(&command.program[1..])
        .current_dir(folder.path())
        .output()
        .unwrap();
    text(&output.stdout) + &text(&output.stderr)
}

fn is_root(folder: &Path) -> bool {
    use std::os::unix::fs::MetadataExt;
    std::fs::metadata(folder).unwrap().uid() == 0
}

#[tokio::test]
async fn no_attack_gets_through() {
    let host = Host::new();
    let root = is_root(host.folder.path());
    let mut through = vec![];
    let mut cannot_fail = vec![];
    for (name, expected, attack) in ATTACKS {
        let output = SANDBOX.run(&program(attack, &host.describe())).await.unwrap();
        let said = text(&output.stdout);
        if said != "HELD\n" || output.ended != Ended::Exited(0) {
            through.push(format!("{name}: {said}{}{:?}", text(&output.stderr), output.ended));
        }
        if *expected == Always || (*expected == AsRoot && root) {
            let said = outside(attack, &host);
            if !said.starts_with("THROUGH") {
                cannot_fail.push(format!("{name}: {said}"));
            }
        }
    }
    assert!(
        through.is_empty(),
        "{} attacks got through:\n{}",
        through.len(),
        through.join("\n")
    );
    assert!(
        cannot_fail.is_empty(),
        "they get through nowhere:\n{}",
        cannot_fail.join("\n")
    );
    println!("{} attacks tried: 0 got through", ATTACKS.len());
}

#[tokio::test]
async fn a_program_that_signals_every_process_it_can_reaches_only_its_own() {
    let mut host = Host::new();
    for target in ["-1", "1", "os.getppid()", "0", &host.process.id().to_string()] {
        for signal in [9, 15, 19] {
            let source = format!("import os\nos.fork()\ntry: os.kill({target}, {signal})\nexcept OSError: pass");
            let limits = Limits {
                wall: Duration::from_secs(2),
                ..patient()
            };
            run(&source, limits).await; // this process is still here
        }
    }
    assert_eq!(host.process.try_wait().unwrap(), None);
}

#[tokio::test]
async fn arguments_and_files_cannot_change_the_sandbox() {
    let host = Host::new();
    let word = format!("{}/secret", host.folder.path().display());
    // words that would be options of bwrap or prlimit
    for program in [
        vec!["--ro-bind", "/", "/tmp/host", "ls"],
        vec!["--pid=1", "ls"],
        vec!["--", "cat", &word],
        vec!["/bin/cat", &word],
    ] {
        let command = Command {
            program: program.iter().map(|word| (*word).to_owned()).collect(),
            limits: patient(),
            ..Command::default()
        };
        let output = SANDBOX.run(&command).await.unwrap();
        assert!(
            output.stdout.is_empty() && output.ended != Ended::Exited(0),
            "{program:?} {output:?}"
        );
    }
    for path in ["../../etc/x", "/etc/x", "", "a\n--ro-bind", "--share-net"] {
        let mut command = python("import os; print(os.path.exists('/etc/x'), os.listdir('.'))", patient());
        command.files = [(path.to_owned(), b"x".to_vec())].into();
        match SANDBOX.run(&command).await {
            Ok(output) => assert_eq!(text(&output.stdout), format!("False [{}]\n", quoted(path))),
            Err(refused) => assert!(matches!(refused, world::process::Error::Command(_)), "{refused}"),
        }
    }
}

/// As Python writes it.
fn quoted(text: &str) -> String {
    format!("'{}'", text.replace('\n', "\\n"))
}
