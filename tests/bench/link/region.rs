//! Two namespaces and the link between them: the relay runs at the near end, the follower at the
//! far end.

use std::process::Command;

use anyhow::Context;
use link::{Conditions, Link, Namespace};

const SUBNET: u8 = 1;

pub struct Region {
    pub link: Link,
    pub near: Namespace,
    pub far: Namespace,
}

impl Region {
    pub fn join(conditions: Conditions, seed: u64) -> anyhow::Result<Self> {
        let (near, far) = (Namespace::new(), Namespace::new());
        let (near, far) = (
            near.context("make a network namespace")?,
            far.context("make a network namespace")?,
        );
        let link = Link::between(&near, &far, SUBNET, conditions, seed).context("make a link of two TUN devices")?;
        Ok(Self { link, near, far })
    }

    /// Sets the congestion control of senders at the near end, as `net.ipv4.tcp_congestion_control`
    /// would. False: the kernel does not have it. Set on the route, because a namespace may only
    /// choose controls that need no root.
    pub fn set_congestion_control(&self, congestion: &str) -> anyhow::Result<bool> {
        let mut command = Command::new("ip");
        let to = self.link.far().to_string();
        command.args(["route", "replace", &to, "dev", "tun0", "congctl", congestion]);
        let output = self
            .near
            .run(move || command.output())?
            .context("run ip (package iproute2)")?;
        Ok(output.status.success())
    }

    /// Packets that the two devices dropped because they were not read in time.
    pub fn device_drops(&self) -> anyhow::Result<u64> {
        let mut drops = 0;
        for namespace in [&self.near, &self.far] {
            let table = namespace.run(|| std::fs::read_to_string("/proc/thread-self/net/dev"))??;
            let lines = table.lines().filter(|line| line.trim_start().starts_with("tun"));
            // 8 receive columns, then the transmit columns: bytes, packets, errors, drops
            let sent = lines.filter_map(|line| line.split_whitespace().nth(12)?.parse::<u64>().ok());
            drops += sent.sum::<u64>();
        }
        Ok(drops)
    }
}
