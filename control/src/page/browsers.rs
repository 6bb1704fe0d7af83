//! What browsers get where programs get a problem document: the form to log in, or a page that says what
//! is wrong.

use axum::Router;
use axum::extract::Request;
use axum::http::{HeaderMap, HeaderValue, Method, StatusCode, Uri, header};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Redirect, Response};
use edge::Problem;
use edge::auth::cookie;
use maud::html;

use crate::page::layout::{Shown, document};
use crate::page::login;

/// Paths below this one are for programs, also where a browser asks for them.
const API: &str = "/v1/";
const STATIC: &str = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; form-action 'none'; base-uri 'none'; \
                      frame-ancestors 'none'";

/// Answers browsers with pages. Programs, which do not ask for HTML, get the same as before.
pub fn for_browsers(router: Router) -> Router {
    router.layer(middleware::from_fn(answer))
}

async fn answer(request: Request, next: Next) -> Response {
    let (method, uri) = (request.method().clone(), request.uri().clone());
    let browser = wants_page(request.headers()) && !uri.path().starts_with(API);
    let kept = cookie::is_kept(request.headers());
    let response = next.run(request).await;
    let problem = response.extensions().get::<Problem>();
    match problem.filter(|_| browser) {
        None => harmless(response),
        Some(problem) => page_of(problem, &method, &uri, kept),
    }
}

/// Pages of other crates have a style sheet of their own and no script. They get the limits that let
/// nothing else in.
fn harmless(mut response: Response) -> Response {
    let headers = response.headers_mut();
    let content = headers
        .get(header::CONTENT_TYPE)
        .and_then(|content| content.to_str().ok());
    let is_page = content.is_some_and(|content| content.starts_with("text/html"));
    if is_page && !headers.contains_key(header::CONTENT_SECURITY_POLICY) {
        for (name, value) in [
            (header::CONTENT_SECURITY_POLICY, STATIC),
            (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
            (header::REFERRER_POLICY, "same-origin"),
            (header::CACHE_CONTROL, "no-store"),
        ] {
            headers.insert(name, HeaderValue::from_static(value));
        }
    }
    response
}

fn wants_page(headers: &HeaderMap) -> bool {
    let accepted = headers.get(header::ACCEPT).and_then(|accept| accept.to_str().ok());
    accepted.is_some_and(|accept| accept.contains("text/html"))
}

fn page_of(problem: &Problem, method: &Method, uri: &Uri, kept: bool) -> Response {
    if problem.status == StatusCode::UNAUTHORIZED && method == Method::GET {
        let asked = uri.path_and_query().map_or("/", |path| path.as_str());
        return Redirect::to(&login::address(asked, kept)).into_response();
    }
    let body = html! {
        div .login {
            h1 { (problem.title) }
            @if let Some(detail) = &problem.detail { p .lead { (detail) } }
            p {
                a href="/" { "What serves whom now" }
                @if problem.status == StatusCode::FORBIDDEN { " · " a href="/login" { "Log in with another key" } }
            }
        }
    };
    let mut response = Shown(problem.status, document(&problem.title, None, &html! {}, &body)).into_response();
    if let Some(seconds) = problem.retry_after_seconds {
        response
            .headers_mut()
            .insert(header::RETRY_AFTER, HeaderValue::from(seconds));
    }
    response
}

#[cfg(test)]
mod tests {
    use super::*;
    use axum::body::Body;
    use axum::routing::get;
    use tower::ServiceExt;

    async fn asked(path: &str, accept: &str) -> Response {
        let router = Router::new()
            .route("/releases", get(async || Problem::unauthorized("no key")))
            .route("/keys", get(async || Problem::forbidden("it needs <admin>")))
            .route("/v1/releases", get(async || Problem::unauthorized("no key")))
            .route("/report", get(async || axum::response::Html("<p>a report")))
            .route("/", get(async || "all is well"));
        let request = Request::builder().uri(path).header("accept", accept);
        let request = request.body(Body::empty()).unwrap();
        for_browsers(router).oneshot(request).await.unwrap()
    }

    const BROWSER: &str = "text/html,application/xhtml+xml,*/*;q=0.8";

    #[tokio::test]
    async fn a_browser_without_a_key_is_asked_for_one_and_comes_back() {
        let response = asked("/releases?a=b&c", BROWSER).await;
        assert_eq!(response.status(), StatusCode::SEE_OTHER);
        assert_eq!(
            response.headers()[header::LOCATION],
            "/login?next=%2Freleases%3Fa%3Db%26c"
        );
    }

    #[tokio::test]
    async fn programs_and_the_api_get_problem_documents() {
        for (path, accept) in [("/releases", "*/*"), ("/v1/releases", BROWSER)] {
            let response = asked(path, accept).await;
            assert_eq!(response.status(), StatusCode::UNAUTHORIZED, "{path}");
            assert_eq!(
                response.headers()[header::CONTENT_TYPE],
                "application/problem+json",
                "{path}"
            );
        }
    }

    #[tokio::test]
    async fn pages_of_other_crates_run_no_script() {
        let response = asked("/report", BROWSER).await;
        let policy = response.headers()[header::CONTENT_SECURITY_POLICY].to_str().unwrap();
        assert!(
            policy.contains("default-src 'none'") && policy.contains("frame-ancestors 'none'"),
            "{policy}"
        );
        assert!(
            !asked("/", BROWSER)
                .await
                .headers()
                .contains_key(header::CONTENT_SECURITY_POLICY)
        );
    }

    #[tokio::test]
    async fn other_problems_are_pages_with_the_same_status() {
        let response = asked("/keys", BROWSER).await;
        assert_eq!(response.status(), StatusCode::FORBIDDEN);
        let body = axum::body::to_bytes(response.into_body(), 1 << 20).await.unwrap();
        let page = String::from_utf8(body.to_vec()).unwrap();
        assert!(
            page.contains("it needs &lt;admin&gt;") && page.contains("/login"),
            "{page}"
        );
        assert_eq!(asked("/", BROWSER).await.status(), StatusCode::OK);
    }
}
