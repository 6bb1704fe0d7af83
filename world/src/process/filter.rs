//! The system calls that a program in a sandbox may make, as a seccomp filter.
//!
//! The list names what is allowed. Everything else answers ENOSYS, as on a kernel that lacks the call, so
//! programs fall back where they can (glibc from `clone3` to `clone`). New calls of new kernels and the
//! x32 numbers of x86 are refused without being named. Left out on purpose: ptrace and the memory of other
//! processes, mounts, namespaces, keys, BPF, perf, io_uring, userfaultfd, modules, kexec, clocks that are
//! set, memory that no limit counts (memfd, System V).

use super::Error;
use nix::libc;
use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen as Len, SeccompCmpOp as Op, SeccompCondition as Condition,
    SeccompFilter, SeccompRule as Rule,
};
use std::collections::BTreeMap;

/// `clone` may not make namespaces.
const NAMESPACES: u64 = (libc::CLONE_NEWNS
    | libc::CLONE_NEWCGROUP
    | libc::CLONE_NEWUTS
    | libc::CLONE_NEWIPC
    | libc::CLONE_NEWUSER
    | libc::CLONE_NEWPID
    | libc::CLONE_NEWNET) as u32 as u64;

/// The filter as the kernel reads it: an array of `struct sock_filter`.
pub(super) fn compiled() -> Result<Vec<u8>, Error> {
    let program = program().map_err(|error| Error::Start {
        what: "compile the seccomp filter",
        source: std::io::Error::other(error),
    })?;
    let mut bytes = Vec::with_capacity(program.len() * 8);
    for instruction in program {
        bytes.extend(instruction.code.to_ne_bytes());
        bytes.extend([instruction.jt, instruction.jf]);
        bytes.extend(instruction.k.to_ne_bytes());
    }
    Ok(bytes)
}

fn program() -> Result<BpfProgram, seccompiler::BackendError> {
    let mut rules: BTreeMap<i64, Vec<Rule>> = allowed().map(|call| (call, vec![])).collect();
    rules.extend(conditional()?);
    let architecture = std::env::consts::ARCH.try_into()?;
    let refused = SeccompAction::Errno(libc::ENOSYS as u32);
    SeccompFilter::new(rules, refused, SeccompAction::Allow, architecture)?.try_into()
}

/// Calls that are allowed with some arguments only.
fn conditional() -> Result<BTreeMap<i64, Vec<Rule>>, seccompiler::BackendError> {
    let is = |argument, value: u64| Condition::new(argument, Len::Dword, Op::Eq, value);
    let is_not = |argument, value: u64| Condition::new(argument, Len::Dword, Op::Ne, value);
    let no_namespaces = Condition::new(0, Len::Qword, Op::MaskedEq(NAMESPACES), 0)?;
    let unix = is(0, libc::AF_UNIX as u64)?;
    // typing into the terminal of whoever started the sandbox
    let no_typing = vec![is_not(1, libc::TIOCSTI)?, is_not(1, libc::TIOCLINUX)?];
    let pipe = Op::MaskedEq(u64::from(libc::S_IFMT));
    let named_pipe = |argument| Condition::new(argument, Len::Dword, pipe.clone(), u64::from(libc::S_IFIFO));
    Ok(BTreeMap::from([
        (libc::SYS_clone, vec![Rule::new(vec![no_namespaces])?]),
        (libc::SYS_socket, vec![Rule::new(vec![unix.clone()])?]),
        (libc::SYS_socketpair, vec![Rule::new(vec![unix])?]),
        (libc::SYS_ioctl, vec![Rule::new(no_typing)?]),
        (libc::SYS_mknodat, vec![Rule::new(vec![named_pipe(2)?])?]),
        #[cfg(target_arch = "x86_64")]
        (libc::SYS_mknod, vec![Rule::new(vec![named_pipe(1)?])?]),
    ]))
}

fn allowed() -> impl Iterator<Item = i64> {
    let groups = [FILES, MEMORY, PROCESSES, SIGNALS_AND_TIME, SOCKETS, OLD];
    groups.into_iter().flatten().copied()
}

#[rustfmt::skip]
const FILES: &[i64] = &[
    libc::SYS_read, libc::SYS_write, libc::SYS_readv, libc::SYS_writev, libc::SYS_pread64, libc::SYS_pwrite64,
    libc::SYS_preadv, libc::SYS_pwritev, libc::SYS_preadv2, libc::SYS_pwritev2, libc::SYS_openat, libc::SYS_openat2,
    libc::SYS_close, libc::SYS_close_range, libc::SYS_lseek, libc::SYS_fstat, libc::SYS_newfstatat, libc::SYS_statx,
    libc::SYS_statfs, libc::SYS_fstatfs, libc::SYS_faccessat, libc::SYS_faccessat2, libc::SYS_readlinkat,
    libc::SYS_getdents64, libc::SYS_getcwd, libc::SYS_chdir, libc::SYS_fchdir, libc::SYS_mkdirat, libc::SYS_unlinkat,
    libc::SYS_renameat, libc::SYS_renameat2, libc::SYS_linkat, libc::SYS_symlinkat, libc::SYS_fchmod, libc::SYS_fchmodat,
    libc::SYS_fchown, libc::SYS_fchownat, libc::SYS_umask, libc::SYS_utimensat, libc::SYS_truncate, libc::SYS_ftruncate,
    libc::SYS_fallocate, libc::SYS_fsync, libc::SYS_fdatasync, libc::SYS_sync_file_range, libc::SYS_flock, libc::SYS_fcntl,
    libc::SYS_dup, libc::SYS_dup3, libc::SYS_pipe2, libc::SYS_ppoll, libc::SYS_pselect6, libc::SYS_epoll_create1,
    libc::SYS_epoll_ctl, libc::SYS_epoll_pwait, libc::SYS_epoll_pwait2, libc::SYS_eventfd2, libc::SYS_signalfd4,
    libc::SYS_inotify_init1, libc::SYS_inotify_add_watch, libc::SYS_inotify_rm_watch, libc::SYS_sendfile, libc::SYS_splice,
    libc::SYS_tee, libc::SYS_copy_file_range, libc::SYS_fadvise64, libc::SYS_readahead, libc::SYS_getxattr,
    libc::SYS_lgetxattr, libc::SYS_fgetxattr, libc::SYS_listxattr, libc::SYS_llistxattr, libc::SYS_flistxattr,
];

#[rustfmt::skip]
const MEMORY: &[i64] = &[
    libc::SYS_brk, libc::SYS_mmap, libc::SYS_munmap, libc::SYS_mremap, libc::SYS_mprotect, libc::SYS_madvise,
    libc::SYS_msync, libc::SYS_mincore, libc::SYS_membarrier, libc::SYS_mlock, libc::SYS_munlock, libc::SYS_get_mempolicy,
    libc::SYS_pkey_alloc, libc::SYS_pkey_free, libc::SYS_pkey_mprotect,
];

#[rustfmt::skip]
const PROCESSES: &[i64] = &[
    libc::SYS_execve, libc::SYS_execveat, libc::SYS_exit, libc::SYS_exit_group, libc::SYS_wait4, libc::SYS_waitid,
    libc::SYS_getpid, libc::SYS_getppid, libc::SYS_gettid, libc::SYS_getpgid, libc::SYS_setpgid, libc::SYS_getsid,
    libc::SYS_setsid, libc::SYS_getuid, libc::SYS_geteuid, libc::SYS_getgid, libc::SYS_getegid, libc::SYS_getresuid,
    libc::SYS_getresgid, libc::SYS_getgroups, libc::SYS_setuid, libc::SYS_setgid, libc::SYS_setreuid, libc::SYS_setregid,
    libc::SYS_setresuid, libc::SYS_setresgid, libc::SYS_setfsuid, libc::SYS_setfsgid, libc::SYS_capget, libc::SYS_prctl,
    libc::SYS_futex, libc::SYS_set_robust_list, libc::SYS_get_robust_list, libc::SYS_set_tid_address, libc::SYS_rseq,
    libc::SYS_sched_yield, libc::SYS_sched_getaffinity, libc::SYS_sched_setaffinity, libc::SYS_sched_getparam,
    libc::SYS_sched_getscheduler, libc::SYS_sched_get_priority_max, libc::SYS_sched_get_priority_min, libc::SYS_getpriority,
    libc::SYS_setpriority, libc::SYS_getcpu, libc::SYS_getrlimit, libc::SYS_setrlimit, libc::SYS_prlimit64,
    libc::SYS_getrusage, libc::SYS_times, libc::SYS_uname, libc::SYS_sysinfo, libc::SYS_getrandom, libc::SYS_pidfd_open,
    libc::SYS_pidfd_send_signal,
];

#[rustfmt::skip]
const SIGNALS_AND_TIME: &[i64] = &[
    libc::SYS_rt_sigaction, libc::SYS_rt_sigprocmask, libc::SYS_rt_sigreturn, libc::SYS_rt_sigpending,
    libc::SYS_rt_sigsuspend, libc::SYS_rt_sigtimedwait, libc::SYS_rt_sigqueueinfo, libc::SYS_rt_tgsigqueueinfo,
    libc::SYS_sigaltstack, libc::SYS_kill, libc::SYS_tkill, libc::SYS_tgkill, libc::SYS_restart_syscall,
    libc::SYS_clock_gettime, libc::SYS_clock_getres, libc::SYS_clock_nanosleep, libc::SYS_nanosleep,
    libc::SYS_gettimeofday, libc::SYS_getitimer, libc::SYS_setitimer, libc::SYS_timer_create, libc::SYS_timer_settime,
    libc::SYS_timer_gettime, libc::SYS_timer_getoverrun, libc::SYS_timer_delete, libc::SYS_timerfd_create,
    libc::SYS_timerfd_settime, libc::SYS_timerfd_gettime,
];

/// Of the family `AF_UNIX` alone.
#[rustfmt::skip]
const SOCKETS: &[i64] = &[
    libc::SYS_bind, libc::SYS_listen, libc::SYS_accept, libc::SYS_accept4, libc::SYS_connect, libc::SYS_getsockname,
    libc::SYS_getpeername, libc::SYS_sendto, libc::SYS_recvfrom, libc::SYS_sendmsg, libc::SYS_recvmsg, libc::SYS_sendmmsg,
    libc::SYS_recvmmsg, libc::SYS_shutdown, libc::SYS_getsockopt, libc::SYS_setsockopt,
];

/// The older forms of calls above, which only x86 has.
#[cfg(target_arch = "x86_64")]
#[rustfmt::skip]
const OLD: &[i64] = &[
    libc::SYS_open, libc::SYS_creat, libc::SYS_stat, libc::SYS_lstat, libc::SYS_access, libc::SYS_readlink,
    libc::SYS_getdents, libc::SYS_mkdir, libc::SYS_rmdir, libc::SYS_unlink, libc::SYS_rename, libc::SYS_link,
    libc::SYS_symlink, libc::SYS_chmod, libc::SYS_chown, libc::SYS_lchown, libc::SYS_utime, libc::SYS_utimes,
    libc::SYS_futimesat, libc::SYS_dup2, libc::SYS_pipe, libc::SYS_poll, libc::SYS_select, libc::SYS_epoll_create,
    libc::SYS_epoll_wait, libc::SYS_eventfd, libc::SYS_signalfd, libc::SYS_inotify_init, libc::SYS_fork, libc::SYS_vfork,
    libc::SYS_getpgrp, libc::SYS_alarm, libc::SYS_pause, libc::SYS_time, libc::SYS_arch_prctl,
];
#[cfg(not(target_arch = "x86_64"))]
const OLD: &[i64] = &[];
