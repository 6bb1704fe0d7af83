//! `springtide tide`: what rollouts may use of each engine, and what it cost production. A client of
//! the control API.

use serde_json::{Value, json};

use super::App;
use super::control_client::ControlClient;
use super::output::{Output, cell, rows, table};

#[derive(Debug, Clone, clap::Args)]
pub struct Args {
    /// Hours to sum over.
    #[arg(long, default_value = "24", value_name = "N")]
    hours: u32,
    /// Days of costs by run.
    #[arg(long, default_value = "7", value_name = "N")]
    days: u32,
    #[command(flatten)]
    output: Output,
}

impl Args {
    pub async fn run(self, app: &App) -> anyhow::Result<()> {
        let client = ControlClient::new(&app.config)?;
        let (hours, days) = (self.hours.to_string(), self.days.to_string());
        let tide: Value = client.get("/v1/tide", &[("hours", &hours)]).await?;
        let costs: Value = client.get("/v1/ledger/cost", &[("days", &days)]).await?;
        let document = json!({"tide": tide, "costs": costs["costs"]});
        self.output.print(&document, || page(&tide, &costs))
    }
}

fn page(tide: &Value, costs: &Value) -> String {
    if rows(&tide["engines"]).next().is_none() {
        return "no replica has reported how its slots are used".to_owned();
    }
    let mut page = table(
        [
            "replica",
            "cluster",
            ">slots",
            ">lent now",
            "why",
            ">needed",
            ">expected",
        ],
        rows(&tide["engines"]).map(now),
    );
    page += &format!("\nin the last {} hours\n", tide["hours"]);
    page += &table(
        [
            "replica",
            ">idle slot-s",
            ">harvested",
            ">taken back",
            ">slowest ms",
            ">first token ms alone",
            ">beside",
            ">token ms alone",
            ">beside",
        ],
        rows(&tide["engines"]).map(past),
    );
    if rows(&costs["costs"]).next().is_some() {
        page += "\ncosts\n";
        page += &table(
            [
                "day",
                "work",
                "run",
                ">sampled",
                ">read",
                ">read again",
                ">thrown away",
                ">engine s",
            ],
            rows(&costs["costs"]).map(cost),
        );
    }
    page
}

fn name(engine: &Value) -> String {
    match engine["engine"].as_i64() {
        Some(number @ 1..) => format!("{} #{number}", cell(&engine["replica"])),
        _ => cell(&engine["replica"]),
    }
}

fn now(engine: &Value) -> [String; 7] {
    let lent = match (engine["slot_limit"].as_i64(), engine["whole"].as_bool()) {
        (None, _) => "no limit".to_owned(),
        (Some(_), Some(true)) => "whole".to_owned(),
        (Some(slots), _) => slots.to_string(),
    };
    [
        name(engine),
        cell(&engine["cluster"]),
        cell(&engine["slots"]),
        lent,
        cell(&engine["why"]).replace('_', " "),
        cell(&engine["needed"]),
        rounded(&engine["expected"], 1),
    ]
}

fn past(engine: &Value) -> [String; 9] {
    let (idle, harvested) = (&engine["idle_slot_seconds"], &engine["harvested_slot_seconds"]);
    let share = match (idle.as_f64(), harvested.as_f64()) {
        (Some(idle), Some(harvested)) if idle > 0.0 => format!("{:.0}%", harvested / idle * 100.0),
        _ => String::new(),
    };
    [
        name(engine),
        rounded(idle, 0),
        share,
        cell(&engine["taken_back"]),
        rounded(&engine["taking_back_ms_max"], 1),
        rounded(&engine["first_token_ms_alone"], 1),
        rounded(&engine["first_token_ms_beside"], 1),
        rounded(&engine["token_ms_alone"], 2),
        rounded(&engine["token_ms_beside"], 2),
    ]
}

fn cost(cost: &Value) -> [String; 8] {
    [
        cell(&cost["day"]),
        cell(&cost["work"]),
        cell(&cost["run"]),
        cell(&cost["sampled"]),
        cell(&cost["read"]),
        cell(&cost["read_again"]),
        cell(&cost["thrown_away"]),
        rounded(&cost["engine_seconds"], 1),
    ]
}

fn rounded(value: &Value, digits: usize) -> String {
    value
        .as_f64()
        .map_or(String::new(), |value| format!("{value:.digits$}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_shows_the_decision_the_harvest_and_the_costs() {
        let tide = json!({"hours": 24, "engines": [{
            "replica": "replica-1", "cluster": "local", "engine": 0, "slots": 16, "slot_limit": 9, "whole": false,
            "why": "cool_down", "needed": 3, "expected": 4.5, "idle_slot_seconds": 200.0,
            "harvested_slot_seconds": 150.0, "taken_back": 7, "taking_back_ms_max": 12.25,
            "first_token_ms_alone": null, "first_token_ms_beside": 31.0, "token_ms_alone": 2.0, "token_ms_beside": 3.0,
        }]});
        let costs = json!({"costs": [{"day": "2026-11-02", "work": "rollout", "run": "r", "sampled": 5, "read": 6,
            "read_again": 1, "thrown_away": 0, "engine_seconds": 1.25}]});
        let page = page(&tide, &costs);
        for part in ["cool down", "75%", "12.2", "2026-11-02", "rollout", "31.0"] {
            assert!(page.contains(part), "{part} is not in\n{page}");
        }
        assert!(super::page(&json!({"engines": []}), &json!({})).contains("no replica"));
    }
}
