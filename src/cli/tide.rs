//! `springtide tide`: what rollouts may use of each engine, and what it cost production. A client of
//! the control API.

use serde_json::json;
use serving::tide::http::report::{Cost, Costs, EngineView, Tide};

use super::App;
use super::control_client::ControlClient;
use super::output::{Output, table};

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
        let tide: Tide = client.get("/v1/tide", &[("hours", &hours)]).await?;
        let Costs { costs } = client.get("/v1/ledger/cost", &[("days", &days)]).await?;
        let document = json!({"tide": tide, "costs": costs});
        self.output.print(&document, || page(&tide, &costs))
    }
}

fn page(tide: &Tide, costs: &[Cost]) -> String {
    if tide.engines.is_empty() {
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
        tide.engines.iter().map(now),
    );
    page += &format!("\nin the last {} hours\n", tide.hours);
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
        tide.engines.iter().map(past),
    );
    if !costs.is_empty() {
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
            costs.iter().map(cost),
        );
    }
    page
}

fn name(engine: &EngineView) -> String {
    match engine.engine {
        number @ 1.. => format!("{} #{number}", engine.replica),
        _ => engine.replica.clone(),
    }
}

fn now(engine: &EngineView) -> [String; 7] {
    let lent = match engine.slot_limit {
        None => "no limit".to_owned(),
        Some(_) if engine.whole => "whole".to_owned(),
        Some(slots) => slots.to_string(),
    };
    [
        name(engine),
        engine.cluster.clone().unwrap_or_default(),
        engine.slots.to_string(),
        lent,
        engine.why.as_deref().unwrap_or_default().replace('_', " "),
        engine.needed.to_string(),
        rounded(engine.expected, 1),
    ]
}

fn past(engine: &EngineView) -> [String; 9] {
    let (idle, harvested) = (engine.idle_slot_seconds, engine.harvested_slot_seconds);
    let share = match idle > 0.0 {
        true => format!("{:.0}%", harvested / idle * 100.0),
        false => String::new(),
    };
    [
        name(engine),
        format!("{idle:.0}"),
        share,
        engine.taken_back.to_string(),
        format!("{:.1}", engine.taking_back_ms_max),
        rounded(engine.first_token_ms_alone, 1),
        rounded(engine.first_token_ms_beside, 1),
        rounded(engine.token_ms_alone, 2),
        rounded(engine.token_ms_beside, 2),
    ]
}

fn cost(cost: &Cost) -> [String; 8] {
    [
        cost.day.to_string(),
        cost.work.clone(),
        cost.run.map_or(String::new(), |run| run.to_string()),
        cost.sampled.to_string(),
        cost.read.to_string(),
        cost.read_again.to_string(),
        cost.thrown_away.to_string(),
        format!("{:.1}", cost.engine_seconds),
    ]
}

fn rounded(value: Option<f64>, digits: usize) -> String {
    value.map_or(String::new(), |value| format!("{value:.digits$}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_shows_the_decision_the_harvest_and_the_costs() {
        let tide = json!({"hours": 24, "clusters": [], "engines": [{
            "replica": "replica-1", "cluster": "local", "engine": 0, "slots": 16, "slot_limit": 9, "whole": false,
            "why": "cool_down", "at": "2026-11-02T00:00:00Z", "needed": 3, "expected": 4.5,
            "production_slot_seconds": 0.0, "idle_slot_seconds": 200.0, "lendable_slot_seconds": 0.0,
            "harvested_slot_seconds": 150.0, "taken_back": 7, "taking_back_ms_max": 12.25,
            "first_token_ms_beside": 31.0, "token_ms_alone": 2.0, "token_ms_beside": 3.0,
        }]});
        let costs = json!([{"day": "2026-11-02", "work": "rollout", "run": null, "sampled": 5, "read": 6,
            "read_again": 1, "thrown_away": 0, "slot_seconds": 2.0, "engine_seconds": 1.25}]);
        let mut tide: Tide = serde_json::from_value(tide).unwrap();
        let costs: Vec<Cost> = serde_json::from_value(costs).unwrap();
        let page = page(&tide, &costs);
        for part in ["cool down", "75%", "12.2", "2026-11-02", "rollout", "31.0"] {
            assert!(page.contains(part), "{part} is not in\n{page}");
        }
        tide.engines.clear();
        assert!(super::page(&tide, &[]).contains("no replica"));
    }
}
