//! `GET /report`: the report of the last demo on this state folder. It is for browsers, so a
//! missing report is an HTML page too, not a problem document.

use std::io::ErrorKind;
use std::path::PathBuf;

use axum::extract::State;
use axum::http::StatusCode;
use axum::response::Html;
use edge::Problem;

const NONE_YET: &str = "<!doctype html><title>No report yet</title><p>There is no report yet: <code>springtide demo</code> \
                        writes one when it is over.</p>";

pub async fn page(State(path): State<PathBuf>) -> Result<(StatusCode, Html<String>), Problem> {
    match tokio::fs::read_to_string(&path).await {
        Ok(page) => Ok((StatusCode::OK, Html(page))),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok((StatusCode::NOT_FOUND, Html(NONE_YET.to_owned()))),
        Err(error) => Err(Problem::internal(format!("read {}: {error}", path.display()))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_missing_report_says_how_to_get_one() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("report.html");
        let (status, Html(text)) = page(State(path.clone())).await.unwrap();
        assert_eq!(status, StatusCode::NOT_FOUND);
        assert!(text.contains("springtide demo"));
        std::fs::write(&path, "<p>a page").unwrap();
        let (status, Html(text)) = page(State(path)).await.unwrap();
        assert_eq!((status, text.as_str()), (StatusCode::OK, "<p>a page"));
    }
}
