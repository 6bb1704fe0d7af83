//! The frame of every page: head, navigation, regions with where their figures come from, and dialogs
//! for actions.

use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use maud::{DOCTYPE, Markup, html};
use serde_json::{Map, Value};

use crate::page::assets;
use crate::page::site::Site;
use crate::page::viewer::Viewer;
use crate::page::watched::Watched;

/// Nothing is loaded from elsewhere, no script stands in the page, and nobody frames it.
const POLICY: &str = "default-src 'self'; img-src 'self' data:; object-src 'none'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'";

/// Path and name of each section, in the order of the navigation.
const SECTIONS: [(&str, &str); 11] = [
    ("/", "Now"),
    ("/releases", "Releases"),
    ("/versions", "Versions"),
    ("/learning", "Learning"),
    ("/trajectories", "Trajectories"),
    ("/runs", "Runs"),
    ("/tide", "Tide"),
    ("/fleet", "Fleet"),
    ("/feedback", "Feedback"),
    ("/ledger", "Ledger"),
    ("/keys", "Keys"),
];

/// A part of a page with its heading. The body is sent again while somebody looks, if the page is live.
#[derive(Debug)]
pub struct Region {
    /// Unique on the page.
    pub id: &'static str,
    pub title: &'static str,
    pub body: Markup,
    /// Commands and requests that give the same figures.
    pub sources: Vec<String>,
}

/// A page as a handler makes it.
#[derive(Debug)]
pub struct Page<'a> {
    pub title: &'a str,
    /// Path of the section in the navigation.
    pub section: &'a str,
    /// One or two sentences.
    pub lead: Markup,
    /// The query of `/live` that sends its regions again.
    pub live: Option<String>,
    /// Above the regions, such as a form that filters.
    pub top: Markup,
    pub regions: &'a [Region],
    /// Below the regions. Never sent again, so it is the place of dialogs.
    pub bottom: Markup,
}

/// An HTML answer with the headers of a page.
#[derive(Debug)]
pub struct Shown(pub StatusCode, pub Markup);

impl IntoResponse for Shown {
    fn into_response(self) -> Response {
        let mut response = (self.0, self.1.into_string()).into_response();
        let headers = response.headers_mut();
        for (name, value) in [
            (header::CONTENT_TYPE, "text/html; charset=utf-8"),
            (header::CONTENT_SECURITY_POLICY, POLICY),
            (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
            (header::REFERRER_POLICY, "same-origin"),
            // what a key may see stays in no cache
            (header::CACHE_CONTROL, "no-store"),
        ] {
            headers.insert(name, HeaderValue::from_static(value));
        }
        response
    }
}

impl Page<'_> {
    pub fn show(&self, site: &Site, viewer: &Viewer) -> Shown {
        let top = html! {
            div .top {
                nav aria-label="Sections" {
                    ul {
                        @for (path, name) in SECTIONS {
                            li { a href=(path) aria-current=[(path == self.section).then_some("page")] { (name) } }
                        }
                    }
                }
                div .who {
                    span { "policy " b { (site.policy()) } }
                    @if viewer.key.is_some() {
                        form method="post" action="/logout" {
                            span { (viewer.label) } " "
                            button .plain { "Log out" }
                        }
                    } @else {
                        span { "no key needed here" }
                    }
                    @if self.live.is_some() { span #live-state role="status" {} }
                }
            }
        };
        let main = html! {
            h1 { (self.title) }
            p .lead { (self.lead) }
            noscript {
                p .note { "Without scripts this page shows everything, but does not refresh, and its buttons do nothing: \
                           use the commands." }
            }
            (self.top)
            @for region in self.regions { (section(region)) }
            (self.bottom)
        };
        Shown(StatusCode::OK, document(self.title, self.live.as_deref(), &top, &main))
    }
}

/// A page whose regions are watched, with something above them and below.
pub fn framed(
    site: &Site,
    viewer: &Viewer,
    watched: Watched,
    title: &str,
    section: &str,
    [lead, top, bottom]: [Markup; 3],
    regions: &[Region],
) -> Shown {
    let page = Page {
        title,
        section,
        lead,
        live: Some(watched.query()),
        top,
        regions,
        bottom,
    };
    page.show(site, viewer)
}

fn section(region: &Region) -> Markup {
    let heading = format!("{}-title", region.id);
    html! {
        section aria-labelledby=(heading) {
            h2 id=(heading) { (region.title) }
            div id=(region.id) .region { (region.body) }
            @if !region.sources.is_empty() {
                details .sources {
                    summary { "Where from" span .hidden { ": " (region.title) } }
                    ul { @for source in &region.sources { li { code { (source) } } } }
                }
            }
        }
    }
}

/// A whole document.
pub fn document(title: &str, live: Option<&str>, top: &Markup, main: &Markup) -> Markup {
    html! {
        (DOCTYPE)
        html lang="en" {
            head {
                meta charset="utf-8";
                meta name="viewport" content="width=device-width, initial-scale=1";
                meta name="color-scheme" content="light dark";
                title { (title) " – Springtide" }
                link rel="icon" href="data:,";
                link rel="stylesheet" href=(assets::style_url());
                script src=(assets::script_url()) defer {}
            }
            body data-live=[live.map(|query| format!("/live?{query}"))] {
                a .skip href="#main" { "Skip to content" }
                (top)
                main #main tabindex="-1" { (main) }
            }
        }
    }
}

/// A table in a card of its own, which scrolls sideways where it is too wide. It can be scrolled by
/// keyboard.
pub fn table(label: &str, head: &[&str], rows: &[Vec<Markup>], none: &str) -> Markup {
    html! {
        @if rows.is_empty() {
            p .none { (none) }
        } @else {
            div .card .wide tabindex="0" role="region" aria-label=(label) {
                table {
                    thead { tr { @for name in head { th scope="col" { (name) } } } }
                    tbody { @for row in rows { tr { @for cell in row { td { (cell) } } } } }
                }
            }
        }
    }
}

/// Markup of a plain text, for cells.
pub fn text(text: impl std::fmt::Display) -> Markup {
    html! { (text.to_string()) }
}

/// A figure of a tile.
pub fn tile(label: &str, value: &Markup, notes: &[Markup]) -> Markup {
    html! {
        div .tile {
            p { (label) }
            p .value { (value) }
            @for note in notes { p { (note) } }
        }
    }
}

/// Something that a person can do: a request to the control API.
#[derive(Debug)]
pub struct Action {
    /// Unique on the page.
    pub id: String,
    pub button: String,
    /// What it does, in a sentence or two.
    pub does: String,
    /// Path of the API, to which the dialog posts.
    pub path: String,
    /// The fields of the request that nobody fills in.
    pub fixed: Map<String, Value>,
    pub inputs: Vec<Input>,
    /// The command that does the same.
    pub command: String,
    pub dangerous: bool,
}

/// A field that a person fills in.
#[derive(Debug)]
pub struct Input {
    /// Of the request.
    pub name: &'static str,
    pub label: &'static str,
    pub value: String,
    pub kind: InputKind,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum InputKind {
    Text,
    Number,
}

impl Input {
    /// Why: what every decision asks for.
    pub fn reason() -> Self {
        Self {
            name: "reason",
            label: "Reason, for the audit",
            value: String::new(),
            kind: InputKind::Text,
        }
    }

    pub fn version(value: Option<i64>) -> Self {
        Self {
            name: "version",
            label: "Version",
            value: value.map(|version| version.to_string()).unwrap_or_default(),
            kind: InputKind::Number,
        }
    }
}

/// Buttons, each with a dialog that says what will happen and asks. `scope`: what the viewer lacks.
pub fn actions(actions: &[Action], scope: Option<&str>) -> Markup {
    html! {
        @if let Some(scope) = scope {
            p .note {
                "Your key may look, but not decide: that needs a key with the scope " code { (scope) } ". "
                "Or use the commands."
            }
            ul .commands { @for action in actions { li { (action.does) br; code { (action.command) } } } }
        } @else {
            div .buttons { @for action in actions { (button(action)) } }
            (dialogs(actions))
        }
    }
}

/// The button of an action whose dialog stands elsewhere.
pub fn button(action: &Action) -> Markup {
    html! {
        button type="button" data-dialog=(action.id) .danger[action.dangerous] { (action.button) }
    }
}

/// The dialogs of buttons, for below the regions.
pub fn dialogs<'a>(actions: impl IntoIterator<Item = &'a Action>) -> Markup {
    html! { @for action in actions { (dialog(action)) } }
}

fn dialog(action: &Action) -> Markup {
    let title = format!("{}-title", action.id);
    html! {
        dialog id=(action.id) aria-labelledby=(title) {
            form data-post=(action.path) data-fixed=(Value::Object(action.fixed.clone())) {
                h3 id=(title) { (action.button) "?" }
                p { (action.does) }
                @for input in &action.inputs {
                    @let id = format!("{}-{}", action.id, input.name);
                    label for=(id) { (input.label) }
                    input id=(id) name=(input.name) value=(input.value) required autocomplete="off"
                        type=(if input.kind == InputKind::Number { "number" } else { "text" })
                        min=[(input.kind == InputKind::Number).then_some("0")];
                }
                p .note { "The same as " code { (action.command) } }
                p .failed role="alert" {}
                div .buttons {
                    button .danger[action.dangerous] { (action.button) }
                    button type="button" .plain data-close { "Leave it as it is" }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn action() -> Action {
        Action {
            id: "hold".into(),
            button: "Hold".into(),
            does: "It stays where it is.".into(),
            path: "/v1/canaries/1/hold".into(),
            fixed: json!({"kind": "\"><script>"}).as_object().cloned().unwrap(),
            inputs: vec![Input::reason()],
            command: "springtide canary hold 1 --reason '…'".into(),
            dangerous: false,
        }
    }

    #[test]
    fn an_action_says_what_it_does_and_what_the_command_is() {
        let shown = actions(&[action()], None).into_string();
        for part in [
            "data-dialog=\"hold\"",
            "<dialog id=\"hold\"",
            "It stays where it is.",
            "data-post=\"/v1/canaries/1/hold\"",
            "springtide canary hold 1",
            "name=\"reason\"",
        ] {
            assert!(shown.contains(part), "{part}: {shown}");
        }
        assert!(!shown.contains("<script>"), "{shown}");
    }

    #[test]
    fn without_the_scope_there_is_no_button_and_the_scope_is_named() {
        let shown = actions(&[action()], Some("release")).into_string();
        assert!(!shown.contains("<button") && !shown.contains("<dialog"), "{shown}");
        assert!(
            shown.contains("<code>release</code>") && shown.contains("springtide canary hold"),
            "{shown}"
        );
    }

    #[test]
    fn a_table_can_be_scrolled_by_keyboard_and_an_empty_one_says_so() {
        let shown = table("Moves", &["a"], &[vec![text("<b>")]], "none").into_string();
        assert!(
            shown.contains("tabindex=\"0\"") && shown.contains("&lt;b&gt;"),
            "{shown}"
        );
        assert_eq!(
            table("Moves", &["a"], &[], "none yet").into_string(),
            "<p class=\"none\">none yet</p>"
        );
    }

    #[test]
    fn a_page_forbids_scripts_and_styles_that_stand_in_it() {
        let response = Shown(StatusCode::OK, html! {}).into_response();
        let policy = response.headers()[header::CONTENT_SECURITY_POLICY].to_str().unwrap();
        assert!(
            policy.contains("default-src 'self'") && !policy.contains("unsafe"),
            "{policy}"
        );
        assert_eq!(response.headers()[header::CACHE_CONTROL], "no-store");
        let page = document("t", Some("section=now"), &html! {}, &html! {}).into_string();
        assert!(
            !page.contains("<style") && !page.contains(" style=") && !page.contains("http"),
            "{page}"
        );
        assert!(page.contains("data-live=\"/live?section=now\""), "{page}");
    }
}
