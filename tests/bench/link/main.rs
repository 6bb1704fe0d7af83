//! `make bench NAME=link`: which share of a link's rate a download through a relay reaches, with several
//! streams, with and without delay and loss, compared with a bare TCP stream over the same link.
//!
//! Each measurement uses new namespaces, so that the kernel's cached metrics of a route do not
//! affect the next one.

mod bare;
mod object;
mod region;

use std::fs;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, ensure};
use clap::Parser;
use link::{Conditions, Counts};
use serde::Serialize;

use object::Object;
use region::Region;

/// Any number. The same traffic loses the same packets.
const SEED: u64 = 7;

#[derive(Debug, Clone, Parser, Serialize)]
struct Args {
    /// The binary whose relay is measured.
    #[arg(long, default_value = "target/debug/springtide")]
    springtide: PathBuf,
    /// Size of the object, MiB.
    #[arg(long, default_value_t = 256)]
    mib: u64,
    /// The link's rate in Mb/s of IP packets; headers take 3.5% of it.
    #[arg(long, default_value_t = 1000)]
    rate_mbit: u64,
    /// One-way delay in ms, in the measurements with delay.
    #[arg(long, default_value_t = 50)]
    delay_ms: u64,
    /// Share of packets lost in each direction, in the measurements with loss.
    #[arg(long, default_value_t = 0.001)]
    loss: f64,
    /// Size of the link's queue, in ms at its rate.
    #[arg(long, default_value_t = 50)]
    queue_ms: u64,
    /// Parts fetched at once.
    #[arg(long, value_delimiter = ',', default_values_t = [1, 4, 8])]
    streams: Vec<usize>,
    /// Congestion controls of the sender, one after the other.
    #[arg(long, value_delimiter = ',', default_values_t = ["cubic".to_owned(), "bbr".to_owned()])]
    congestion: Vec<String>,
    /// Longest transfer in seconds. A longer one is cut off and counted with the bytes received
    /// until then.
    #[arg(long, default_value_t = 60.0)]
    seconds_max: f64,
    /// Repetitions of each transfer.
    #[arg(long, default_value_t = 3)]
    times: usize,
    #[arg(long, default_value = "target/bench/link.json")]
    json: PathBuf,
}

/// The result of one transfer.
#[derive(Debug, Clone, Copy)]
struct Transfer {
    bytes: u64,
    seconds: f64,
    /// Parts that were sent more than once.
    resent_parts: u64,
}

#[derive(Debug, Serialize)]
struct Row {
    delay_ms: u64,
    loss: f64,
    way: String,
    bytes: u64,
    seconds: f64,
    mbit_per_s: f64,
    /// Share of the link's rate.
    share: f64,
    cut_off: bool,
    /// Parts that were sent more than once; 0 if it was cut off.
    #[serde(rename = "again")]
    resent_parts: u64,
    packets: Counts,
    /// Packets that the devices dropped before the link read them.
    device_drops: u64,
}

#[derive(Debug, Serialize)]
struct Report {
    args: Args,
    /// Rate of a bare stream over an unlimited link: the most that this machine can simulate.
    free_mbit_per_s: f64,
    rows: Vec<Row>,
}

fn main() -> anyhow::Result<()> {
    let args = Args::parse();
    ensure!(
        nix::unistd::geteuid().is_root(),
        "this needs root, for network namespaces and TUN devices (they vanish at the end)"
    );
    ensure!(
        args.springtide.exists(),
        "{} does not exist; build it first (`make bench NAME=link` does)",
        args.springtide.display()
    );
    let object = Object::make(args.mib << 20)?;
    let limit = Duration::from_secs_f64(args.seconds_max);

    let region = Region::join(Conditions::FREE, SEED)?;
    let free = bare::stream(&region, object.size_bytes(), limit)?;
    object.fill_relay(&args.springtide, &region)?;
    drop(region);
    let free_mbit_per_s = mbit_per_s(free);
    println!("a bare stream over an unlimited link: {free_mbit_per_s:.0} Mb/s");

    let rate_bits = args.rate_mbit * 1_000_000;
    let near = Conditions {
        rate_bits: Some(rate_bits),
        queue_bytes: rate_bits / 8 * args.queue_ms / 1000,
        ..Conditions::FREE
    };
    let delay = Duration::from_millis(args.delay_ms);
    let far = Conditions { delay, ..near };
    let lossy = Conditions { loss: args.loss, ..far };
    let mut report = Report {
        args: args.clone(),
        free_mbit_per_s,
        rows: vec![],
    };
    println!(
        "round trip    loss  way                              MiB  seconds     Mb/s  of the link    again  lost packets  no room"
    );
    for conditions in [near, far, lossy] {
        for round in 0..args.times {
            for congestion in &args.congestion {
                for streams in std::iter::once(None).chain(args.streams.iter().copied().map(Some)) {
                    let region = Region::join(conditions, SEED + round as u64)?;
                    if !region.set_congestion_control(congestion)? {
                        println!("this kernel has no {congestion}");
                        break;
                    }
                    let (way, transfer) = match streams {
                        None => (
                            "bare TCP".to_owned(),
                            bare::stream(&region, object.size_bytes(), limit)?,
                        ),
                        Some(streams) => (
                            format!("download, {streams} at once"),
                            object.download(&args.springtide, &region, streams, limit)?,
                        ),
                    };
                    report.add(&region, conditions, format!("{way}, {congestion}"), transfer)?;
                }
            }
        }
    }
    if let Some(parent) = args.json.parent() {
        fs::create_dir_all(parent)?;
    }
    fs::write(&args.json, serde_json::to_string_pretty(&report)?)
        .with_context(|| format!("write {}", args.json.display()))?;
    println!("{}", args.json.display());
    Ok(())
}

impl Report {
    fn add(&mut self, region: &Region, conditions: Conditions, way: String, transfer: Transfer) -> anyhow::Result<()> {
        let row = Row {
            delay_ms: conditions.delay.as_millis() as u64,
            loss: conditions.loss,
            way,
            bytes: transfer.bytes,
            seconds: transfer.seconds,
            mbit_per_s: mbit_per_s(transfer),
            share: mbit_per_s(transfer) / self.args.rate_mbit as f64,
            cut_off: transfer.bytes < self.args.mib << 20,
            resent_parts: transfer.resent_parts,
            packets: region.link.counts(),
            device_drops: region.device_drops()?,
        };
        println!(
            "{:>7} ms {:>8.2}%  {:<29} {:>6.0} {:>8.2} {:>8.1} {:>11.1}% {:>8} {:>13} {:>8}{}{}",
            2 * row.delay_ms,
            row.loss * 100.0,
            row.way,
            row.bytes as f64 / f64::from(1 << 20),
            row.seconds,
            row.mbit_per_s,
            row.share * 100.0,
            row.resent_parts,
            row.packets.lost,
            row.packets.full,
            if row.cut_off { ", cut off" } else { "" },
            match row.device_drops {
                0 => String::new(),
                drops => format!(", {drops} dropped before the link"),
            }
        );
        self.rows.push(row);
        Ok(())
    }
}

fn mbit_per_s(transfer: Transfer) -> f64 {
    transfer.bytes as f64 * 8.0 / 1e6 / transfer.seconds
}
