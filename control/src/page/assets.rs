//! The script and the style sheet of the pages, which the program contains.

use std::sync::LazyLock;

use axum::http::header;
use axum::response::{IntoResponse, Response};

const SCRIPT: &str = include_str!("assets/page.js");
const STYLE: &str = include_str!("assets/page.css");

/// The style sheet of reports, for their charts and tables, and what pages have besides.
static WHOLE_STYLE: LazyLock<String> = LazyLock::new(|| format!("{}{STYLE}", report::page::STYLE));

static SCRIPT_URL: LazyLock<String> = LazyLock::new(|| url("/page.js", SCRIPT));
static STYLE_URL: LazyLock<String> = LazyLock::new(|| url("/page.css", &WHOLE_STYLE));

/// Another content has another address, so browsers may keep it.
fn url(path: &str, content: &str) -> String {
    let digest = blake3::hash(content.as_bytes()).to_hex();
    format!("{path}?{}", &digest[..12])
}

pub fn script_url() -> &'static str {
    &SCRIPT_URL
}

pub fn style_url() -> &'static str {
    &STYLE_URL
}

fn file(content_type: &'static str, content: &'static str) -> Response {
    let headers = [
        (header::CONTENT_TYPE, content_type),
        (header::CACHE_CONTROL, "public, max-age=86400"),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
    ];
    (headers, content).into_response()
}

pub async fn script() -> Response {
    file("text/javascript; charset=utf-8", SCRIPT)
}

pub async fn style() -> Response {
    file("text/css; charset=utf-8", &WHOLE_STYLE)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_script_is_short_and_loads_nothing_from_elsewhere() {
        assert!(SCRIPT.lines().count() < 150);
        for forbidden in ["http:", "https:", "eval(", "import "] {
            assert!(!SCRIPT.contains(forbidden), "{forbidden}");
        }
        assert!(!WHOLE_STYLE.contains("url(") && !WHOLE_STYLE.contains("@import"));
        assert!(script_url().starts_with("/page.js?") && style_url() != script_url());
    }
}
