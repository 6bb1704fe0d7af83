//! The page around a report: one HTML document without scripts, fonts or addresses, and its parts.

use maud::{DOCTYPE, Markup, PreEscaped, html};

const STYLE: &str = include_str!("style.css");

/// A whole document. `style` is CSS of the report's own, after the common style sheet.
pub fn document(title: &str, style: &str, body: &Markup) -> String {
    let page = html! {
        (DOCTYPE)
        html lang="en" {
            head {
                meta charset="utf-8";
                meta name="viewport" content="width=device-width, initial-scale=1";
                meta name="color-scheme" content="light dark";
                title { (title) }
                style { (PreEscaped(STYLE)) (PreEscaped(style)) }
            }
            body { main { (body) } }
        }
    };
    page.into_string()
}

/// A section with its heading.
pub fn section(title: &str, body: &Markup) -> Markup {
    html! {
        section { h2 { (title) } (body) }
    }
}

/// A table of names and values.
pub fn facts(rows: &[(&str, String)]) -> Markup {
    html! {
        table .facts {
            @for (name, value) in rows {
                tr { th { (name) } td { (value) } }
            }
        }
    }
}

/// One headline figure.
#[derive(Debug)]
pub struct Tile {
    pub name: &'static str,
    pub value: String,
    /// Lines below the value.
    pub notes: Vec<String>,
}

pub fn tiles(tiles: &[Tile]) -> Markup {
    html! {
        div .tiles {
            @for Tile { name, value, notes } in tiles {
                div .tile {
                    p { (name) }
                    p .value { (value) }
                    @for note in notes { p { (note) } }
                }
            }
        }
    }
}
