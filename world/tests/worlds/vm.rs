//! Worlds that are virtual machines. All tests fork one snapshot.

use std::collections::BTreeMap;
use std::time::Duration;

use crate::support::{self, block_on, command, fork, owned_pool, pool, processes_under, psql, run, shell};
use world::provider::{Error, Provider as _, World as _};
use world::{Ended, Limit, Limits};

#[test]
#[ignore = "needs an image: make check NAME=world"]
fn two_forks_of_one_snapshot_diverge_and_the_snapshot_stays_as_it_was() {
    block_on(async {
        let (mut one, mut two) = (fork().await, fork().await);
        for (world, value) in [(&mut one, 1), (&mut two, 2)] {
            psql(world, &format!("insert into seed values ({value})")).await;
            let file = format!("echo {value} > /tmp/only-here && echo {value} > only-here");
            assert_eq!(shell(world, &file).await.ended, Ended::Exited(0));
        }
        for (world, value) in [(&mut one, "1"), (&mut two, "2")] {
            assert_eq!(psql(world, "select v from seed where v > 0").await, value);
            let files = shell(world, "cat /tmp/only-here only-here").await;
            assert_eq!(String::from_utf8_lossy(&files.stdout), format!("{value}\n{value}\n"));
        }
        let mut later = fork().await;
        assert_eq!(psql(&mut later, "select count(*) from seed where v > 0").await, "0");
        assert_eq!(
            psql(&mut later, "select v from seed").await,
            "0",
            "what `setup` left is in every fork"
        );
        assert_eq!(shell(&mut later, "ls /tmp/only-here").await.ended, Ended::Exited(2));
    });
}

#[test]
#[ignore = "needs an image: make check NAME=world"]
fn a_fork_answers_from_postgres_and_has_its_own_name_clock_and_entropy() {
    block_on(async {
        let (mut one, mut two) = (fork().await, fork().await);
        assert_eq!(psql(&mut one, "select 1").await, "1");
        for what in [
            "psql -Atc 'select gen_random_uuid()'",
            "psql -Atc 'select random()'",
            "cat /proc/sys/kernel/hostname",
            "cat /etc/machine-id",
            "head -c 16 /dev/urandom | od -x",
            "python3 -c 'import random; print(random.random())'",
            "mktemp",
        ] {
            let answers = [shell(&mut one, what).await, shell(&mut two, what).await];
            assert!(
                answers.iter().all(|answer| answer.ended == Ended::Exited(0)),
                "{what}: {answers:?}"
            );
            assert_ne!(answers[0].stdout, answers[1].stdout, "{what}");
        }
        let now = psql(&mut two, "select extract(epoch from now())").await;
        let host = std::time::SystemTime::now()
            .duration_since(std::time::UNIX_EPOCH)
            .unwrap();
        let apart = (now.parse::<f64>().unwrap() - host.as_secs_f64()).abs();
        assert!(apart < 60.0, "the clock is {apart} s off");
    });
}

#[test]
#[ignore = "needs an image: make check NAME=world"]
fn a_program_gets_its_input_and_files_and_finds_what_earlier_ones_left() {
    block_on(async {
        let mut world = fork().await;
        let mut cat = command(&["sh", "-c", "cat; cat sub/a.txt; echo no >&2; exit 3"]);
        cat.stdin = vec![0xff; 100_000];
        cat.files = BTreeMap::from([("sub/a.txt".to_owned(), b"text".to_vec())]);
        cat.limits.output_bytes = 1 << 20;
        let output = world.run(&cat).await.unwrap();
        assert_eq!(output.ended, Ended::Exited(3));
        assert_eq!(output.stdout, [&vec![0xff; 100_000][..], b"text"].concat());
        assert_eq!(output.stderr, b"no\n");
        assert_eq!(run(&mut world, &["cat", "sub/a.txt"]).await.stdout, b"text");
        let killed = shell(&mut world, "kill -TERM $$").await;
        assert_eq!(killed.ended, Ended::Signalled(15));
        for path in ["../a", "/etc/passwd", "a//b", ""] {
            let mut refused = command(&["true"]);
            refused.files = BTreeMap::from([(path.to_owned(), Vec::new())]);
            assert!(matches!(world.run(&refused).await, Err(Error::Refused(_))), "{path:?}");
        }
        let missing = world.run(&command(&["no-such-program"])).await;
        assert!(matches!(missing, Err(Error::Refused(_))), "{missing:?}");
        assert_eq!(
            run(&mut world, &["true"]).await.ended,
            Ended::Exited(0),
            "a refusal leaves it as it was"
        );
    });
}

#[test]
#[ignore = "needs an image: make check NAME=world"]
fn limits_hold_on_time_memory_output_processes_and_disk() {
    block_on(async {
        let mut world = fork().await;
        let limits = |change: fn(&mut Limits)| {
            let mut limits = Limits {
                wall: Duration::from_secs(60),
                ..Limits::default()
            };
            change(&mut limits);
            limits
        };
        for (script, limits, expected) in [
            (
                "sleep 1000",
                limits(|l| l.wall = Duration::from_millis(500)),
                Limit::Wall,
            ),
            // What it leaves in the background ends with it.
            (
                "sleep 1000 & sleep 1000",
                limits(|l| l.wall = Duration::from_millis(500)),
                Limit::Wall,
            ),
            (
                "while :; do :; done",
                limits(|l| l.cpu = Duration::from_millis(500)),
                Limit::Cpu,
            ),
            ("yes", limits(|l| l.output_bytes = 1000), Limit::Output),
            ("yes >&2", limits(|l| l.output_bytes = 1000), Limit::Output),
            (
                "python3 -c 'x = bytearray(100 << 20)'",
                limits(|l| l.memory_bytes = 32 << 20),
                Limit::Memory,
            ),
            // Files count as memory.
            (
                "dd if=/dev/zero of=/tmp/full bs=1M count=60",
                limits(|l| l.memory_bytes = 32 << 20),
                Limit::Memory,
            ),
        ] {
            let mut command = command(&["bash", "-c", script]);
            command.limits = limits;
            let output = world.run(&command).await.unwrap();
            assert_eq!(output.ended, Ended::Exceeded(expected), "{script}");
            assert!(output.stdout.len() <= limits.output_bytes as usize, "{script}");
        }
        let mut bomb = command(&["bash", "-c", "f() { f | f & }; f; sleep 1; ls -d /proc/[0-9]* | wc -l"]);
        bomb.limits.cpu = Duration::from_secs(5);
        world.run(&bomb).await.unwrap();
        let left = shell(
            &mut world,
            "grep -l '^Uid:.1000' /proc/[0-9]*/status 2>/dev/null | wc -l",
        )
        .await;
        let left: u32 = String::from_utf8_lossy(&left.stdout).trim().parse().unwrap();
        assert!(left <= 5, "{left} processes of the fork bomb are left");
        let full = shell(
            &mut world,
            "for i in 1 2 3 4 5 6 7 8; do dd if=/dev/zero of=/tmp/f$i bs=1M count=100; done",
        )
        .await;
        assert!(
            full.ended == Ended::Exceeded(Limit::Memory)
                || String::from_utf8_lossy(&full.stderr).contains("No space left"),
            "{full:?}"
        );
        shell(&mut world, "rm -f /tmp/f*").await;
        assert_eq!(
            psql(&mut world, "select 1").await,
            "1",
            "the services outlive all of it"
        );
    });
}

#[test]
#[ignore = "needs an image: make check NAME=world"]
fn what_a_program_left_running_in_postgres_ends_with_it() {
    block_on(async {
        let mut world = fork().await;
        psql(&mut world, "create table item (v int)").await;
        let mut locks = command(&["psql", "-c", "begin; lock table item; select pg_sleep(100000)"]);
        locks.limits.wall = Duration::from_secs(3);
        let output = world.run(&locks).await.unwrap();
        assert_eq!(output.ended, Ended::Exceeded(Limit::Wall));
        let others = "select count(*) from pg_stat_activity where backend_type = 'client backend'";
        assert_eq!(psql(&mut world, others).await, "1");
        assert_eq!(psql(&mut world, "select count(*) from item").await, "0");
    });
}

#[test]
#[ignore = "needs an image: make check NAME=world"]
fn no_attempt_to_leave_a_world_gets_through() {
    block_on(async {
        let mut world = fork().await;
        let attempts = [
            ("a network interface", "grep -v -e '|' -e ' *lo:' /proc/net/dev"),
            ("an address of the host", "timeout 2 bash -c '</dev/tcp/10.0.2.2/22'"),
            ("the world's disk", "head -c 1 /dev/vda"),
            ("its kernel's memory", "head -c 1 /dev/mem"),
            (
                "the agent's port",
                "for p in /dev/vport*; do head -c 1 $p && exit 0; done; exit 1",
            ),
            ("the agent's file", "echo >> /usr/lib/springtide/agent.py"),
            ("the agent's process", "kill -9 1"),
            ("the agent's memory", "head -c 1 /proc/1/mem"),
            ("another user", "busybox su -c id"),
            (
                "a setuid program",
                "find / -xdev -perm /6000 -type f 2>/dev/null | grep .",
            ),
            ("a mount", "busybox mount -t tmpfs x /mnt"),
            ("a module of the kernel", "busybox insmod /modules/overlay.ko"),
            ("the kernel's settings", "echo 1 > /proc/sys/kernel/sysrq"),
            ("a reboot", "echo b > /proc/sysrq-trigger"),
            ("ports of the machine", "head -c 1 /dev/port"),
            (
                "its own limits",
                "echo max > /sys/fs/cgroup/$(cut -d: -f3 /proc/self/cgroup)/memory.max",
            ),
            ("the clock", "date -s 2000-01-01"),
            ("Postgres as its superuser", "psql -U postgres -c 'select 1'"),
            ("a program of Postgres", "psql -c \"copy (select 1) to program 'id'\""),
        ];
        let mut through = Vec::new();
        for (what, script) in attempts {
            if shell(&mut world, script).await.ended == Ended::Exited(0) {
                through.push(what);
            }
        }
        println!("{} attempts, {} got through", attempts.len(), through.len());
        assert!(through.is_empty(), "{through:?}");
        assert_eq!(psql(&mut world, "select 1").await, "1");
    });
}

#[test]
#[ignore = "needs an image: make check NAME=world"]
fn qemu_has_no_capabilities_no_network_and_a_seccomp_filter() {
    block_on(async {
        let world = fork().await;
        let inside = processes_under(world.pid())
            .into_iter()
            .find(|(_, name)| name.starts_with("qemu"));
        let (qemu, _) = inside.expect("a process of QEMU");
        let status = std::fs::read_to_string(format!("/proc/{qemu}/status")).unwrap();
        let field = |name: &str| {
            let line = status.lines().find_map(|line| line.strip_prefix(name));
            line.unwrap().trim().to_owned()
        };
        assert_eq!(field("CapEff:"), "0000000000000000");
        assert_eq!(field("NoNewPrivs:"), "1");
        assert_eq!(field("Seccomp:"), "2");
        let interfaces = std::fs::read_to_string(format!("/proc/{qemu}/net/dev")).unwrap();
        assert!(
            interfaces.lines().skip(2).all(|line| line.trim().starts_with("lo:")),
            "{interfaces}"
        );
    });
}

#[test]
#[ignore = "needs an image: make check NAME=world"]
fn a_machine_killed_in_mid_run_is_a_clear_error_and_other_worlds_go_on() {
    block_on(async {
        let mut world = fork().await;
        let bubblewrap = world.pid();
        let killer = tokio::spawn(async move {
            tokio::time::sleep(Duration::from_secs(1)).await;
            let (qemu, _) = processes_under(bubblewrap)
                .into_iter()
                .find(|(_, name)| name.starts_with("qemu"))
                .expect("a process of QEMU");
            support::kill(qemu);
        });
        let mut sleep = command(&["sleep", "1000"]);
        sleep.limits.wall = Duration::from_secs(600);
        let error = world.run(&sleep).await.unwrap_err();
        killer.await.unwrap();
        assert!(matches!(error, Error::Lost(_)), "{error:?}");
        assert!(error.to_string().contains("create another one"), "{error}");
        let again = world.run(&command(&["true"])).await.unwrap_err();
        assert!(matches!(again, Error::Lost(_)), "{again:?}");
        let mut other = pool().await.create().await.unwrap();
        assert_eq!(other.run(&command(&["true"])).await.unwrap().ended, Ended::Exited(0));
    });
}

#[test]
#[ignore = "needs an image: make check NAME=world"]
fn a_pool_survives_the_death_of_its_waiting_forks_and_refuses_more_worlds_than_it_has() {
    block_on(async {
        let pool = owned_pool("full", 1, 2).await;
        support::until("a fork waits", || pool.state().ready == 1).await;
        for pid in pool.ready_pids() {
            support::kill(pid);
        }
        let (one, two) = tokio::join!(pool.create(), pool.create());
        let (mut one, two) = (one.unwrap(), two.unwrap());
        assert_eq!(one.run(&command(&["true"])).await.unwrap().ended, Ended::Exited(0));
        let full = pool.create().await.err().unwrap();
        assert!(matches!(full, Error::Full(_)), "{full:?}");
        assert!(full.to_string().contains("raise worlds_max"), "{full}");
        assert_eq!(pool.state().used, 2);
        two.destroy().await.unwrap();
        drop(one);
        pool.create().await.unwrap().destroy().await.unwrap();
    });
}

#[test]
#[ignore = "needs an image: make check NAME=world"]
fn no_machine_outlives_an_owner_that_was_killed() {
    if std::env::var_os("SPRINGTIDE_WORLD_OWNER").is_some() {
        // The owner: says which process has its machine, and waits to be killed.
        block_on(async {
            let world = support::fork_of(&owned_pool("owner", 0, 1).await).await;
            println!("machine {}", world.pid());
            tokio::time::sleep(Duration::from_secs(600)).await;
        });
        return;
    }
    let mut owner = support::this_test_again("vm::no_machine_outlives_an_owner_that_was_killed");
    let bubblewrap = support::said_by(&mut owner, "machine ");
    let machine: Vec<_> = processes_under(bubblewrap);
    assert!(machine.iter().any(|(_, name)| name.starts_with("qemu")), "{machine:?}");
    owner.kill().unwrap();
    owner.wait().unwrap();
    block_on(support::until("all its processes are gone", || {
        machine.iter().all(|(pid, _)| support::ended(*pid))
    }));
}
