//! The web page of the role `control`: what an operator looks at, and buttons for what the control API
//! does.
//!
//! ```text
//! browser ─► GET /releases    a section ─► read rows ─► HTML          (works without scripts)
//!         ─► GET /live        the same regions again, every few seconds (server-sent events)
//!         ─► POST /v1/…       every action is one of the JSON API
//! ```
//! Each module of [`sections`] is one section: SQL that reads rows, and pure functions from rows to
//! markup. The pages load nothing from elsewhere, and have no build step.
//!
//! Pages decide nothing: what a button does is up to the crates behind `/v1`. What several pages need is in
//! files below all of them; only `stream` and the routes know every section.

mod assets;
mod browsers;
mod layout;
mod live;
mod login;
mod sections;
pub mod site;
mod stream;
mod viewer;
mod watched;
mod words;

pub use browsers::for_browsers;
pub use sections::releases::decisions;
pub use site::Site;

use edge::auth::{Auth, Scope};
use edge::routes::{Routes, get, post};
use edge::turns::Turns;

/// Pages that read many rows.
const HEAVY_AT_ONCE: usize = 2;
/// Of them, running ones and those that wait.
const HEAVY_PER_KEY: usize = 4;
/// The page that reads the log.
const LETTERS_AT_ONCE: usize = 1;
const LETTERS_PER_KEY: usize = 4;

/// The pages, only for the policy's tenant and administrators.
pub fn routes(site: Site) -> Routes {
    use sections::{
        dead_letters, feedback, fleet, keys, learning, ledger, now, releases, runs, tide, trajectories, versions,
    };
    let read = Scope::Read;
    // a viewer who hangs up leaves a statement behind, so these are taken in turn
    let turns = Turns::new(HEAVY_AT_ONCE, HEAVY_PER_KEY);
    Routes::new()
        .route(read, "/", "What serves whom now, for browsers", get(now::page).page())
        .route(read, "/releases", "Releases, for browsers", get(releases::page).page())
        .route(
            read,
            "/releases/{id}",
            "One canary, for browsers",
            get(releases::canary::page).page(),
        )
        .route(
            read,
            "/versions",
            "Versions, for browsers",
            get(versions::page).in_turn(turns.clone()).page(),
        )
        .route(
            read,
            "/versions/{serial}",
            "One version, for browsers",
            get(versions::one::page).in_turn(turns.clone()).page(),
        )
        .route(
            read,
            "/learning",
            "The realtime run, for browsers",
            get(learning::page).in_turn(turns.clone()).page(),
        )
        .route(
            read,
            "/trajectories",
            "Trajectories, for browsers",
            get(trajectories::page).in_turn(turns.clone()).page(),
        )
        .route(
            read,
            "/trajectories/{id}",
            "One trajectory, for browsers",
            get(trajectories::one::page).in_turn(turns.clone()).page(),
        )
        .route(read, "/runs", "Runs, for browsers", get(runs::page).page())
        .route(read, "/runs/{id}", "A run, for browsers", get(runs::one::one).page())
        .route(
            read,
            "/runs/compare",
            "Runs side by side, for browsers",
            get(runs::one::compare).page(),
        )
        .route(read, "/tide", "What rollouts use, for browsers", get(tide::page).page())
        .route(
            read,
            "/fleet",
            "Replicas and swaps, for browsers",
            get(fleet::page).page(),
        )
        .route(
            read,
            "/feedback",
            "How answers were scored, for browsers",
            get(feedback::page).in_turn(turns.clone()).page(),
        )
        .route(
            Scope::Admin,
            "/feedback/dead-letters",
            "Records that could not be stored, for browsers",
            get(dead_letters::page)
                .in_turn(Turns::new(LETTERS_AT_ONCE, LETTERS_PER_KEY))
                .page(),
        )
        .route(
            read,
            "/ledger",
            "What became of the latest generations, for browsers",
            get(ledger::page).in_turn(turns.clone()).page(),
        )
        .route(
            Scope::Texts,
            "/trajectories/{id}/texts",
            "The texts of one answer, for browsers",
            post(trajectories::texts::page).in_turn(turns.clone()).page(),
        )
        .route(
            Scope::Admin,
            "/keys",
            "API keys and the audit, for browsers",
            get(keys::page).page(),
        )
        .route(
            read,
            "/live",
            "The parts of a page that change, as server-sent events",
            get(stream::stream),
        )
        .with_state(site)
}

/// What needs no key: logging in, and the files that the pages load. `auth`: what checks keys.
pub fn open_routes(auth: Auth) -> Routes {
    login::routes(auth)
        .open_route("/page.js", "The script of the pages", get(assets::script))
        .open_route("/page.css", "The style sheet of the pages", get(assets::style))
}
