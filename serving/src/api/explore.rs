//! The floor of exploration: a policy that may decline can fall silent, and what is not shown earns no answer to learn
//! from. For a small share of an arm's requests a coin forbids declining. Decides which; masking is the engine's part and
//! correcting for it the trainer's. Pure.

use super::ask::Ask;
use crate::routing::Route;
use ingest::event::Purpose;
use policy::sampling;

/// How the coin of one choice fell.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Toss {
    /// With which probability it suppresses declining, (0, 1).
    pub share: f32,
    /// The decline token that this choice may not sample.
    pub suppressed: Option<u32>,
}

/// Tosses for a choice, by its seed alone. None where nothing is explored: the arm does not, the version has no decline
/// token, no user waits, or tokens are not drawn from the model's own distribution, which the correction is made for.
pub fn toss(ask: &Ask, route: &Route, seed: u64) -> Option<Toss> {
    let decline = route.version.decline_id?;
    // tossed with the very number that is logged
    let share = route.explore as f32;
    if share <= 0.0 || ask.purpose != Purpose::Production || !ask.params.is_plain() {
        return None;
    }
    Some(Toss {
        share,
        suppressed: sampling::explores(seed, f64::from(share)).then_some(decline),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::options::ServeOptions;
    use crate::routing::tests::version;
    use serde_json::{Value, json};

    fn ask(fields: &Value) -> Ask {
        let mut body = json!({"model": "demo", "prompt": [1]});
        for (name, value) in fields.as_object().unwrap() {
            body[name] = value.clone();
        }
        Ask::new(
            serde_json::from_value(body).unwrap(),
            &ServeOptions::default(),
            "default",
        )
        .unwrap()
    }

    fn route(explore: f64) -> Route {
        Route {
            version: version(7), // declines with 48
            arm: "champion".into(),
            probability: 0.6,
            explore,
        }
    }

    #[test]
    fn the_coin_falls_by_the_seed_and_is_told_either_way() {
        let ask = ask(&json!({}));
        let tosses: Vec<Toss> = (0..2_000).filter_map(|seed| toss(&ask, &route(0.5), seed)).collect();
        assert_eq!(tosses.len(), 2_000);
        assert!(tosses.iter().all(|toss| toss.share == 0.5));
        let suppressed = tosses.iter().filter(|toss| toss.suppressed == Some(48)).count();
        assert!((888..1112).contains(&suppressed), "{suppressed}");
        let free = tosses.iter().filter(|toss| toss.suppressed.is_none()).count();
        assert_eq!(suppressed + free, 2_000);
        assert_eq!(toss(&ask, &route(0.5), 11), toss(&ask, &route(0.5), 11));
    }

    #[test]
    fn only_plainly_sampled_production_of_an_exploring_arm_is_explored() {
        let explored = |fields: &Value, route: &Route| toss(&ask(fields), route, 3).is_some();
        assert!(explored(&json!({}), &route(0.02)));
        assert!(!explored(&json!({}), &route(0.0)));
        assert!(!explored(&json!({"temperature": 0}), &route(0.02)));
        assert!(!explored(&json!({"top_p": 0.9}), &route(0.02)));
        assert!(!explored(&json!({"top_k": 40}), &route(0.02)));
        assert!(!explored(&json!({"metadata": {"purpose": "evaluation"}}), &route(0.02)));
        let mut silent = route(0.02);
        if let Some(version) = std::sync::Arc::get_mut(&mut silent.version) {
            version.decline_id = None;
        }
        assert!(!explored(&json!({}), &silent));
    }
}
