//! The HTML page of a report: one document that loads nothing (no scripts, fonts or links to other
//! files).

use maud::{DOCTYPE, Markup, PreEscaped, html};

/// The common style sheet. [`document`] includes it; a server may also send it as a file.
pub const STYLE: &str = include_str!("style.css");

/// A complete HTML document. `style` is additional CSS; it follows the common style sheet.
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
pub fn name_value_table(rows: &[(&str, String)]) -> Markup {
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
    pub label: &'static str,
    pub value: String,
    /// Lines below the value.
    pub notes: Vec<String>,
}

pub fn render_tiles(tiles: &[Tile]) -> Markup {
    html! {
        div .tiles {
            @for Tile { label, value, notes } in tiles {
                div .tile {
                    p { (label) }
                    p .value { (value) }
                    @for note in notes { p { (note) } }
                }
            }
        }
    }
}
